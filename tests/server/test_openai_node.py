"""The `openai` package for Node against a real server process.

Skipped where node or the package is missing: `npm install openai` in a directory, and OPENAI_NODE_PATH naming its
node_modules.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.servers import Server, wait_for

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
const { createRequire } = require("module");
const OpenAI = createRequire(process.argv[2] + "/")("openai");
(async () => {
  const client = new OpenAI({ baseURL: process.argv[3] + "/v1", apiKey: "none", maxRetries: 0 });
  const model = "smollm2-135m", messages = [{ role: "user", content: "hello" }], out = {};
  out.models = (await client.models.list()).data.map((item) => item.id);
  const chat = { model, messages, max_tokens: 12, seed: 5, n: 4, logprobs: true, top_logprobs: 2 };
  const whole = await client.chat.completions.create(chat);
  out.whole = whole.choices.map((choice) => choice.message.content);
  out.logprobs = whole.choices[0].logprobs.content.length;
  out.usage = whole.usage.completion_tokens;
  out.streamed = ["", "", "", ""];
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true }))
    for (const choice of chunk.choices) out.streamed[choice.index] += choice.delta.content ?? "";
  const text = { model, prompt: "once", max_tokens: 30, seed: 5 };
  out.text = (await client.completions.create(text)).choices[0].text;
  const stop = out.text.slice(10, 12);
  out.stop = stop;
  out.stopped = (await client.completions.create({ ...text, stop: [stop] })).choices[0];
  try { await client.completions.create({ ...text, temperature: -1 }); }
  catch (error) { out.error = [error.constructor.name, error.status, error.param]; }
  try { await client.completions.create({ ...text, model: "other" }); }
  catch (error) { out.missing = [error.constructor.name, error.status, error.code]; }
  const stream = await client.completions.create({ model, prompt: "long", max_tokens: 2000, stream: true });
  let seen = 0;
  for await (const chunk of stream) if (++seen === 3) break;        // leaving the loop aborts
  out.seen = seen;
  console.log(JSON.stringify(out));
})().catch((error) => { console.error(error); process.exit(1); });
"""


def modules() -> Path | None:
    """Where the package lies, or None."""
    named = os.environ.get("OPENAI_NODE_PATH")
    places = [Path(named)] if named else [Path("node_modules")]
    return next((place.resolve() for place in places if (place / "openai").is_dir()), None)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(modules() is None, reason="the npm package openai is not there: set OPENAI_NODE_PATH")
def test_the_node_client_drives_everything(shared: Server, tmp_path: Path) -> None:
    script = tmp_path / "client.js"
    script.write_text(SCRIPT)
    before = shared.metrics()['lawful:request_success_total{finished_reason="abort"}']
    done = subprocess.run(
        ["node", str(script), str(modules()), shared.url], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["models"] == ["smollm2-135m"]
    assert out["streamed"] == out["whole"]
    assert [len(text) for text in out["whole"]] == [12] * 4
    assert (out["logprobs"], out["usage"]) == (12, 48)
    assert out["stopped"]["text"] == out["text"][: out["text"].index(out["stop"])]
    assert out["stopped"]["finish_reason"] == "stop"
    assert out["error"] == ["BadRequestError", 400, "temperature"]
    assert out["missing"] == ["NotFoundError", 404, "model_not_found"]
    assert out["seen"] == 3
    wait_for(shared.idle)
    assert shared.metrics()['lawful:request_success_total{finished_reason="abort"}'] == before + 1
    shared.check_quiet()
