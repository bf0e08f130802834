"""vLLM's `vllm serve` as far as Headway uses it: its options, refused where vLLM refuses them, and its OpenAI API.

It computes: a Llama in numpy from the folder's own safetensors, so what proves a model here proves it. Forms of answers and
errors are those of vLLM 0.32.0, as its CPU build gave them. HEADWAY_FAKE_VLLM names a JSON file by which a test has it fail:
`start_seconds`, `token_seconds`, `die` and `hang` (at a prompt with that text), `noise` (on the weights), `deaf` (healthy, says
nothing).
"""

import argparse
import json
import os
import socketserver
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
FORMATS = ("auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "runai_streamer", "bitsandbytes")
COMPLETION = {
    "model", "prompt", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
    "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user", "prompt_logprobs", "return_token_ids", "top_k",
}  # fmt: skip


def parse(argv):
    parser = argparse.ArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve")
    serve.add_argument("model_tag")
    for name in ("--uds", "--host", "--api-key", "--generation-config"):
        serve.add_argument(name)
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--max-num-seqs", type=int)
    serve.add_argument("--tensor-parallel-size", type=int, default=1)
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    serve.add_argument("--dtype", choices=DTYPES, default="auto")
    serve.add_argument("--load-format", choices=FORMATS, default="auto")
    serve.add_argument("--enforce-eager", action="store_true")
    serve.add_argument("--disable-uvicorn-access-log", action="store_true")
    return parser.parse_args(argv)


class Llama:
    """Logits of a sequence, all at once. State: the weights."""

    def __init__(self, folder, noise=0.0):
        self.config = json.loads((folder / "config.json").read_text())
        if self.config["architectures"] != ["LlamaForCausalLM"]:
            sys.exit(f"Model architectures {self.config['architectures']} are not supported for now.")
        self.weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.weights |= {name: array.astype(np.float32) for name, array in load_file(path).items()}
        if noise:
            draw = np.random.default_rng(0)
            self.weights = {name: array + noise * draw.normal(size=array.shape) for name, array in self.weights.items()}
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.size = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def norm(self, x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[f"{name}.weight"]

    def turned(self, x):
        """Rotary positions of [tokens, heads, size]."""
        rope = self.config.get("rope_parameters") or self.config
        angles = np.arange(len(x))[:, None] / rope["rope_theta"] ** (np.arange(0, self.size, 2) / self.size)
        cos, sin = (np.concatenate([each, each], -1)[:, None] for each in (np.cos(angles), np.sin(angles)))
        left, right = np.split(x, 2, -1)
        return x * cos + np.concatenate([-right, left], -1) * sin

    def attend(self, x, at):
        queries, keys, values = (
            (x @ self.weights[f"{at}.self_attn.{name}_proj.weight"].T).reshape(len(x), -1, self.size) for name in "qkv"
        )
        keys, values = (np.repeat(each, self.heads // self.kv_heads, 1) for each in (self.turned(keys), values))
        scores = np.einsum("qhd,khd->hqk", self.turned(queries), keys) / np.sqrt(self.size)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return (
            np.einsum("hqk,khd->qhd", shares, values).reshape(len(x), -1)
            @ self.weights[f"{at}.self_attn.o_proj.weight"].T
        )

    def logprobs(self, tokens):
        """Of shape [tokens, vocabulary]."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self.attend(self.norm(x, f"{at}.input_layernorm"), at)
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ self.weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{at}.mlp.down_proj.weight"].T
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = self.norm(x, "model.norm") @ head.T
        return logits - np.logaddexp.reduce(logits, axis=-1)[:, None]


class Engine:
    """What answers. State: the network, and what a test has it do."""

    def __init__(self, options, behaviour):
        folder = Path(options.model_tag)
        self.options, self.behaviour = options, behaviour
        self.network = Llama(folder, behaviour.get("noise", 0.0))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        positions = self.network.config["max_position_embeddings"]
        self.longest = options.max_model_len or positions
        if self.longest > positions:
            sys.exit(
                f"User-specified max_model_len ({self.longest}) is greater than the derived max_model_len ({positions})"
            )
        ends = self.network.config["eos_token_id"]
        self.ends = ends if isinstance(ends, list) else [ends]
        self.names = options.served_model_name or [options.model_tag]
        self.served = self.generated = 0

    def tokens(self, prompt):
        if isinstance(prompt, str):
            for word, act in (("die", lambda: os._exit(1)), ("hang", lambda: time.sleep(3600))):
                if self.behaviour.get(word) and self.behaviour[word] in prompt:
                    act()
            return self.tokenizer.encode(prompt).ids
        return list(prompt)

    def too_long(self, prompt, most):
        """Why a request is refused for its length; empty when it is not. What would go beyond the context ends there instead."""
        if most > self.longest:
            text = f"max_tokens={most} cannot be greater than max_model_len={self.longest}. Please request fewer output tokens."
            return f"{text} (parameter=max_tokens, value={most})"
        if len(prompt) < self.longest:
            return ""
        text = f"This model's maximum context length is {self.longest} tokens. However, your prompt contains at least"
        return f"{text} {self.longest + 1} input tokens, which exceeds this limit even without any output tokens."

    def answer(self, prompt, body):
        """Each token with its reason to end, "" while it goes on."""
        known, draw = list(prompt), np.random.default_rng(abs(body.get("seed") or 0))
        heat, most = body.get("temperature", 1.0), min(body.get("max_tokens") or 16, self.longest - len(prompt))
        for count in range(1, most + 1):
            time.sleep(self.behaviour.get("token_seconds", 0.0))
            row = self.network.logprobs(known)[-1]
            shares = np.exp(row / heat) if heat else None
            token = int(row.argmax()) if not heat else int(draw.choice(len(row), p=shares / shares.sum()))
            known.append(token)
            yield token, "stop" if token in self.ends else "length" if count == most else ""
            if token in self.ends:
                return


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, *_):
        pass

    def say(self, status, output, kind="application/json"):
        body = output.encode() if isinstance(output, str) else json.dumps(output).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message, kind):
        self.say(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def allowed(self):
        key = self.engine.options.api_key
        if key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
            self.say(401, {"error": "Unauthorized"})
            return False
        return True

    def do_GET(self):
        engine = self.engine
        if not self.allowed():
            return
        if self.path == "/health":
            self.say(200, "")
        elif self.path == "/metrics":
            text = "# HELP vllm:request_success_total Requests.\n# TYPE vllm:request_success_total counter\n"
            text += f'vllm:request_success_total{{engine="0"}} {engine.served}.0\n'
            self.say(200, text + f'vllm:generation_tokens_total{{engine="0"}} {engine.generated}.0\n', "text/plain")
        elif self.path == "/v1/models":
            models = [
                {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": engine.longest}
                for name in engine.names
            ]
            self.say(200, {"object": "list", "data": models})
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if body.get("model") not in self.engine.names:
            self.refuse(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        elif self.path == "/v1/chat/completions":
            text = "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template"
            self.refuse(400, f"{text} if the tokenizer does not define one.", "BadRequestError")
        elif self.path != "/v1/completions":
            self.say(404, {"detail": "Not Found"})
        elif unknown := sorted(body.keys() - COMPLETION):
            raise AssertionError(f"vLLM would ignore {unknown}, and Headway must not send it")
        else:
            self.complete(body)

    def complete(self, body):
        engine = self.engine
        if engine.behaviour.get("deaf"):
            self.refuse(
                500,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                "InternalServerError",
            )
            return
        prompt = engine.tokens(body["prompt"])
        most = body.get("max_tokens") or 16
        if text := engine.too_long(prompt, most):
            self.refuse(400, text, "BadRequestError")
            return
        self.name = {
            "id": f"cmpl-{uuid.uuid4().hex[:16]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body["model"],
        }
        tokens, whole = [], ""
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
        for token, reason in engine.answer(prompt, body):
            tokens.append(token)
            engine.generated += 1
            # A character whose bytes are not all there is held back, for good at the end of an answer.
            text = engine.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
            stop = next((word for word in body.get("stop") or () if word in text), "")
            text, reason = (text[: text.index(stop)], "stop") if stop else (text, reason)
            new, whole = text[len(whole) :], text
            if body.get("stream"):
                choice = {
                    "index": 0,
                    "text": new,
                    "logprobs": None,
                    "finish_reason": reason or None,
                    "stop_reason": None,
                }
                self.event(choices=[choice | ({"token_ids": [token]} if body.get("return_token_ids") else {})])
            if stop:
                break
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        }
        engine.served += 1
        if body.get("stream"):
            if (body.get("stream_options") or {}).get("include_usage"):
                self.event(choices=[], usage=usage)
            self.wfile.write(b"data: [DONE]\n\n")
            return
        known = None
        if body.get("prompt_logprobs") is not None:
            rows = engine.network.logprobs(prompt)
            known = [None] + [
                {
                    str(token): {
                        "logprob": float(row[token]),
                        "rank": int((row > row[token]).sum()) + 1,
                        "decoded_token": "",
                    }
                }
                for row, token in zip(rows, prompt[1:], strict=False)
            ]
        logprobs = (
            {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            if body.get("logprobs")
            else None
        )
        one = {
            "text": whole,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": None,
            "prompt_logprobs": known,
        }
        choices = [{"index": index, **one} for index in range(body.get("n") or 1)]
        self.say(200, {**self.name, "choices": choices, "usage": usage})

    def event(self, **more):
        self.wfile.write(f"data: {json.dumps({**self.name, **more})}\n\n".encode())
        self.wfile.flush()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def main():
    options = parse(sys.argv[1:])
    path = os.environ.get("HEADWAY_FAKE_VLLM")
    behaviour = json.loads(Path(path).read_text()) if path and Path(path).exists() else {}
    Handler.engine = Engine(options, behaviour)
    time.sleep(behaviour.get("start_seconds", 0.0))
    with Server(options.uds, Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
