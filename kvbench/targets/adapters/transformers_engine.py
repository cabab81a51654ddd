"""transformers' continuous batching of 5.23, stepped in its own process. Arguments: those of `transformers serve`.

The batches are those of its background thread, computed here instead. Without the HTTP server and its tokenizer.
"""

import argparse
import queue


class TransformersEngine:
    GREEDY_ONLY = True

    def __init__(self, settings, arguments):
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        given = _parse(arguments)
        self._torch = torch
        device = given.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(
            given.model, dtype=given.dtype, attn_implementation=given.attn_implementation
        ).to(device)
        sizes = {"block_size": given.cb_block_size, "num_blocks": given.cb_num_blocks,
                 "max_batch_tokens": given.cb_max_batch_tokens, "use_cuda_graph": given.cb_use_cuda_graph}  # fmt: skip
        config = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if value is not None})
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self.manager = self.model.init_continuous_batching(generation, config)
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        if self.processor.use_async_batching:
            raise ValueError("transformers overlaps its batches here (asynchronous batching): a step has no end")
        self.version, self.made, self.cached = transformers.__version__, {}, {}
        self.search = self.processor.cache.search_prefix_match
        self.processor.cache.search_prefix_match = self._search

    def describe(self):
        config, cache = self.model.config.get_text_config(), self.processor.cache
        dtype = str(self.model.dtype).removeprefix("torch.")
        size = self.manager.continuous_batching_config.page_size
        return {
            "engine": {"page_size": size, "max_num_batched_tokens": cache.max_batch_tokens,
                       "enable_prefix_caching": bool(cache.use_prefix_sharing)},
            "resolved": {"device": self.model.device.type, "dtype": dtype,
                         "num_threads": self._torch.get_num_threads()},
            "model": {"name": config.name_or_path, "vocab_size": config.vocab_size,
                      "max_model_len": config.max_position_embeddings},
            "capacity": {"page_size": size, "num_pages": cache.num_blocks, "capacity_tokens": size * cache.num_blocks},
            "versions": {"transformers": self.version, "torch": self._torch.__version__},
        }  # fmt: skip

    def _search(self, name, tokens):
        self.cached[name] = self.search(name, tokens)
        return self.cached[name]

    def cached_tokens(self, name):
        return self.cached.get(name, 0)

    def add(self, name, prompt, max_tokens, temperature, ignore_eos):
        longest = self.model.config.get_text_config().max_position_embeddings
        if temperature or not ignore_eos:
            raise ValueError("this adapter decodes greedily and to the length: temperature 0 and ignore_eos")
        if len(prompt) + max_tokens > longest:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens: {longest} are possible")
        self.made[name] = 0
        self.manager.add_request(list(prompt), request_id=name, max_new_tokens=max_tokens, streaming=True)

    def step(self):
        if self.processor.prepare_next_batch():
            self.manager._generation_step()
            self.processor.update_batch()
        outputs = []
        while True:
            try:
                output = self.manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                return outputs
            name, tokens = output.request_id, list(output.generated_tokens)
            if output.error:
                raise ValueError(f"request {name}: {output.error}")
            ids, self.made[name] = tokens[self.made[name] :], len(tokens)
            outputs.append((name, 0, ids, "length" if output.is_finished() else None))

    def reset_cache(self):
        self.made.clear()
        self.cached.clear()
        self.processor.reset()
        self.processor.cache.reset()  # the hashes of complete blocks, too

    def wait(self):
        if self.model.device.type == "cuda":
            self._torch.cuda.synchronize()


Engine = TransformersEngine


def _parse(arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("model")
    parser.add_argument("--attn-implementation", default="sdpa")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    for name in ("block-size", "num-blocks", "max-batch-tokens"):
        parser.add_argument(f"--cb-{name}", type=int)
    parser.add_argument("--cb-use-cuda-graph", action=argparse.BooleanOptionalAction, default=None)
    given, rest = parser.parse_known_args([word for word in arguments if word != "serve"])
    ignored = {"--continuous-batching", "--host", "--port", "--default-seed"}  # of the server
    if unknown := [word for word in rest if word.startswith("--") and word not in ignored]:
        raise ValueError(f"the adapter does not know {unknown[0]}, which would be lost: leave it out")
    return given
