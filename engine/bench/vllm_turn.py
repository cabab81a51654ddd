"""One turn of vLLM, run by the Python of its own environment: ``python -I vllm_turn.py JOB RESULT``.

JOB is JSON: ``prompts`` (token ids), ``output_tokens``, and ``llm``, the keyword arguments of ``vllm.LLM``. RESULT
gets ``seconds`` of the measured run, ``outputs`` (token ids by prompt) and vLLM's ``version``. In process and without
HTTP, one unmeasured run of the same prompts first, as every side has it. Imports nothing of kvbench, which is not
installed there.
"""

import json
import sys
import time


def main(job_file: str, result_file: str) -> None:
    """Load, run once, run again and write down the second."""
    import vllm

    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    llm = vllm.LLM(**job["llm"])
    params = vllm.SamplingParams(max_tokens=job["output_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    llm.generate(prompts, params, use_tqdm=False)
    started = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump({"seconds": seconds, "outputs": outputs, "version": vllm.__version__}, file)


if __name__ == "__main__":  # vLLM may start processes that import this file again
    main(*sys.argv[1:])
