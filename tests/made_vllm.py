"""A small HTTP server that speaks the routes of vLLM that training uses, with a tiny model behind them."""

import base64
import contextlib
import io
import json
import pickle
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch.multiprocessing.reductions import rebuild_tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from upweight.models.vision import joined_inputs, token_types


def json_server(answer) -> ThreadingHTTPServer:
    """A server, under way, that hands `answer` each request and its JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self, None)

        def do_POST(self):
            length = int(self.headers.get("content-length", 0))
            answer(self, json.loads(self.rfile.read(length) or b"{}"))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class FakeVllm:
    """Serves the model of a folder; `faults` are answers to give instead: {path: [status, ...]}, taken in turn."""

    # One for all servers: transformers patches itself while it loads, and two threads at once leave it so.
    _lock = threading.RLock()

    def __init__(
        self, folder: Path, *, adapters: bool = True, longest: int = 256, version: str = "0.32.0", reader=None
    ) -> None:
        """`reader`: of images, for a vision-language model."""
        self.reader = reader
        self.folder, self.adapters, self.longest, self.version = folder, adapters, longest, version
        self.broadcast: queue.Queue[torch.Tensor] = queue.Queue()  # what a group with the trainer hands over
        self.faults: dict[str, list[int]] = {}
        self.requests: list[tuple[str, dict]] = []
        self.delay = 0.0
        self.held: set[str] = set()  # names whose requests wait
        self.well = True
        self.tokenizer = None  # of the route /tokenize
        self.records_experts = False  # as with --enable-return-routed-experts and --enable-scale-out
        self.raw_logps = False  # log-probs leave out the temperature, as without --logprobs-mode
        self.restart()
        self._server = json_server(self.answer)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def restart(self) -> None:
        """As after a restart: the weights of the folder, no adapters."""
        with self._lock:
            self.began = time.time()
            self.model = self.load(self.folder)
            self.loaded: dict[str, tuple[str, torch.nn.Module]] = {}
            self.tokens = 0
            self.transfer: dict | None = None  # what the trainer said of the way that weights come
            self.updating = False

    def load(self, folder):
        kind = AutoModelForCausalLM if self.reader is None else AutoModelForImageTextToText
        return kind.from_pretrained(folder, dtype=torch.float32).eval()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, path: str) -> list[dict]:
        return [body for where, body in self.requests if where == path]

    def answer(self, handler: BaseHTTPRequestHandler, body: dict | None) -> None:
        path = handler.path
        self.requests.append((path, body or {}))
        status, reply = (500, "down") if not self.well else (200, None)
        if self.well and self.faults.get(path):
            status, reply = self.faults[path].pop(0), "as was asked"
        if status == 200:
            if path == "/v1/completions":
                time.sleep(self.delay)
                while body["model"] in self.held:
                    time.sleep(0.01)
            with self._lock:
                status, reply = self.respond(path, body)
        if status >= 400:
            reply = {"error": {"message": reply, "type": "Error", "param": None, "code": status}}
        text = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        with contextlib.suppress(ConnectionError):
            handler.send_response(status)
            handler.send_header("content-type", "text/plain" if isinstance(reply, str) else "application/json")
            handler.send_header("content-length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)

    def respond(self, path: str, body):
        base = str(self.folder)
        if path in ("/health", "/reset_prefix_cache", "/reset_encoder_cache"):
            return 200, ""
        if path == "/metrics":
            return (
                200,
                f'process_start_time_seconds {self.began}\nvllm:generation_tokens_total{{engine="0"}} {self.tokens}\n',
            )
        if path == "/v1/models":
            entries = [{"id": base, "root": base, "parent": None, "max_model_len": self.longest}]
            entries += [{"id": name, "root": root, "parent": base} for name, (root, _) in self.loaded.items()]
            return 200, {"data": entries}
        if path == "/v1/load_lora_adapter" and self.adapters:
            if body["lora_name"] in self.loaded:
                return 400, "The lora adapter has already been loaded."
            if not Path(body["lora_path"]).is_dir():
                return 404, f"No adapter found for {body['lora_path']}"
            adapted = PeftModel.from_pretrained(self.load(self.folder), body["lora_path"]).eval()
            self.loaded[body["lora_name"]] = (body["lora_path"], adapted)
            return 200, "Success: LoRA adapter added."
        if path == "/v1/unload_lora_adapter" and self.adapters:
            found = self.loaded.pop(body["lora_name"], None)
            return (200, "Success") if found else (404, "The lora adapter cannot be found.")
        if path == "/collective_rpc":
            self.model = self.load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/inference/v1/generate":
            return self.generate(body)
        if path == "/tokenize" and self.tokenizer is not None:
            return 200, {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        return self.transferred(path, body)

    def transferred(self, path, body):
        """The routes of vLLM's weight transfer, as strict about fields and order as it is."""
        old = self.version.startswith("0.26")
        if path in ("/version", "/get_world_size"):
            return 200, {"version": self.version, "world_size": 1}
        if "weight" not in path:
            return 404, "Not Found"
        if path == "/init_weight_transfer_engine":
            self.transfer = body["init_info"]
            if old and "packed" in self.transfer:
                return 500, "Invalid init_info: unexpected keyword argument 'packed'"
            return 200, {"message": "Weight transfer initialized"}
        if path == "/start_weight_update" and not self.updating and self.transfer is not None:
            self.updating = True
        elif path == "/update_weights" and self.updating:
            info = dict(body["update_info"])
            if info.pop("packed", False) != (old and "ipc_handles_pickled" in info):
                return 500, "Invalid update_info: unexpected keyword argument 'packed'"
            state = self.model.state_dict()
            for name, dtype, shape, value in self.received(info):
                assert (str(value.dtype), list(value.shape)) == (f"torch.{dtype}", shape)
                state[name].copy_(value)
        elif path == "/finish_weight_update" and self.updating:
            self.updating = False
        else:
            return 500, "out of turn"
        return 200, {"message": "done"}

    def received(self, info):
        """Names, precisions, shapes and values of what an update brings."""
        if "ipc_handles_pickled" not in info:
            values = [self.broadcast.get(timeout=10) for _ in info["names"]]
        else:
            ((_, handle),) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"])).items()
            parts = rebuild_tensor(*handle).split(info["tensor_sizes"])  # of memory of the CPU, pickled with its bytes
            kinds = zip(parts, info["dtype_names"], info["shapes"], strict=True)
            values = [part.view(getattr(torch, dtype)).view(shape) for part, dtype, shape in kinds]
        return zip(info["names"], info["dtype_names"], info["shapes"], values, strict=True)

    def complete(self, body):
        name, prompt = body["model"], body["prompt"]
        if name != str(self.folder) and name not in self.loaded:
            return 404, f"The model `{name}` does not exist."
        model = self.model if name == str(self.folder) else self.loaded[name][1]
        vocabulary = self.model.config.get_text_config().vocab_size
        if max(prompt) >= vocabulary:
            return 500, "EngineCore encountered an issue"  # a token that the tokenizer has and the model has not
        if any(int(token) >= vocabulary for token in body.get("logit_bias", ())):
            return 400, "token_id(s) in logit_bias contain out-of-vocab token ids"
        ends = [] if body.get("ignore_eos") else body.get("stop_token_ids", [])
        choices = [
            {"index": n, "prompt_token_ids": prompt, **self.written(model, prompt, body, ends)}
            for n in range(body.get("n", 1))
        ]
        if body.get("prompt_logprobs") is not None:
            choices[0]["prompt_logprobs"] = _prompt_logprobs(model, prompt, body["prompt_logprobs"])
        if body.get("logprobs"):
            best = _logps(model, prompt, 1.0 if self.raw_logps else body["temperature"])[-1].topk(body["logprobs"])
            top = {f"token_id:{token}": logp for logp, token in zip(*(part.tolist() for part in best), strict=True)}
            choices[0]["logprobs"]["top_logprobs"] = [top]
        return 200, {"choices": choices[::-1]}

    def generate(self, body):
        if self.reader is not None:
            return self.complete_images(body)
        return self.complete_tokens(body) if self.records_experts else (403, "scale-out is off")

    def complete_images(self, body):
        """As vLLM: placeholders are written out to the tokens of their images, which the forward reads."""
        name, reader, params = body["model"], self.reader, body["sampling_params"]
        model = self.model if name == str(self.folder) else self.loaded[name][1]
        contents = [base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"]]
        written = iter([reader.refer(content, "sent")[1].ids for content in contents])
        (placeholder,) = reader.processor.tokenizer.encode(reader.placeholder, add_special_tokens=False)
        prompt = [one for token in body["token_ids"] for one in (next(written) if token == placeholder else [token])]
        pixels = joined_inputs(reader.family, [reader.inputs_of(content) for content in contents])

        def seeing(input_ids):
            return model(input_ids=input_ids, **pixels, **token_types(reader.family, input_ids == reader.token_id))

        return 200, {"choices": self.generated(seeing, prompt, params), "prompt_token_ids": prompt}

    def complete_tokens(self, body):
        """As vLLM: each completion has the experts of all its tokens but the last, in every decoder layer."""
        prompt, name = body["token_ids"], body["model"]
        model = self.model if name == str(self.folder) else self.loaded[name][1]
        choices = self.generated(model, prompt, body["sampling_params"])
        for choice in choices:
            file = io.BytesIO()
            np.save(file, experts_chosen(model, [*prompt, *choice["token_ids"]][:-1]).astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return 200, {"choices": choices, "prompt_token_ids": prompt}

    def generated(self, model, prompt, params):
        """The choices of an answer of the route for token ids."""
        choices = [
            {"index": n, **self.written(model, prompt, params, params.get("stop_token_ids", []))}
            for n in range(params["n"])
        ]
        for choice in choices:
            logps = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": logp} for token, logp in logps]}
        return choices

    def written(self, model, prompt, body, ends):
        ids, said = [], []
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in ends):
            log_p = _logps(model, [*prompt, *ids], body.get("temperature", 1.0))[-1]
            for token, bias in body.get("logit_bias", {}).items():
                log_p[int(token)] += bias
            log_p = log_p.log_softmax(-1)
            raw = _logps(model, [*prompt, *ids])[-1]
            ids.append(int(torch.multinomial(log_p.exp(), 1)))
            said.append(float((raw if self.raw_logps else log_p)[ids[-1]]))
        self.tokens += len(ids)
        reason = "stop" if ids[-1] in ends else "length"
        return {"token_ids": ids, "logprobs": {"token_logprobs": said}, "finish_reason": reason}


@torch.no_grad()
def experts_chosen(model, ids):
    """The experts of each token in each decoder layer by the router modules themselves; zeros where there is none."""
    config = model.config.get_text_config()
    chosen = np.zeros((len(ids), config.num_hidden_layers, config.num_experts_per_tok), np.int64)
    hooks = []
    for path, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            layer = next(int(part) for part in path.split(".") if part.isdigit())

            def keep(_module, _args, out, layer=layer):
                chosen[:, layer] = out[2].numpy()

            hooks.append(module.register_forward_hook(keep))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen


@torch.no_grad()
def _logps(model, ids, temperature=1.0):
    return (model(input_ids=torch.tensor([ids])).logits[0].float() / (temperature or 1.0)).log_softmax(-1)


def _prompt_logprobs(model, prompt, count):
    """As vLLM: nothing for the first token, then the actual one first, the likeliest, and -9999 for zero."""
    log_p = _logps(model, prompt, 1.0)
    rows = [None]
    for position, token in enumerate(prompt[1:]):
        best = log_p[position].topk(count).indices.tolist() if count else []
        entries = dict.fromkeys([token, *best])
        rows.append({str(one): {"logprob": max(float(log_p[position][one]), -9999.0), "rank": 1} for one in entries})
    return rows
