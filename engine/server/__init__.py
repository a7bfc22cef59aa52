"""The OpenAI-compatible server: `lawful serve`."""
