"""The program of vLLM issue 5578, rerun: chunked prefill, many prompts with n=8, and a KV pool that is far too small.

There the engine admitted new prompts while groups sat in the swap area, the swap area filled up and the engine died.
Here every request finishes, with any swap space, none at all included:

    python examples/report_5578.py                  # the swap area of the report, to scale
    python examples/report_5578.py --swap-space 0   # no swap area: groups are computed again

The arguments are the report's by name; the sizes are scaled to about a CPU minute on SmolLM2.
"""

import argparse
import logging
from pathlib import Path

from engine import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swap-space", type=float, default=0.03, help="GiB (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=24, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=40, help="tokens of each branch (default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S")

    text = (Path(__file__).parent / "sonnets.txt").read_text(encoding="utf-8")
    llm = LLM(
        model="smollm2-135m",
        enable_chunked_prefill=True,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        num_gpu_blocks_override=48,
        swap_space=options.swap_space,
        seed=0,
    )
    token_ids = llm.get_tokenizer().encode(text)
    length = 60
    prompts = [token_ids[i * length : (i + 1) * length] for i in range(options.num_prompts)]
    sampling_params = SamplingParams(n=8, temperature=1.0, max_tokens=options.max_tokens, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=sampling_params)

    assert len(outputs) == len(prompts)
    assert all(len(o.outputs) == 8 and all(len(c.token_ids) == options.max_tokens for c in o.outputs) for o in outputs)
    print(f"\nfirst prompt: {llm.get_tokenizer().decode(prompts[0])!r}")
    print(f"first answer: {outputs[0].outputs[0].text!r}\n")
    for name, value in llm.stats.items():
        print(f"{name:26} {value}")
    print(f"\nall {len(outputs)} requests finished, {8 * len(outputs)} sequences")


if __name__ == "__main__":
    main()
