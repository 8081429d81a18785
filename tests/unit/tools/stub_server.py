"""A stand-in for a vLLM server of a diffusion model, and a task to ask it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.paths import CHECKPOINTS
from vllm_dllm.config.architectures import DIFFUSION_GEMMA

# Its answers, in answers.json by a prompt's end, take 2 canvases of 32 each, of 3 steps each or as
# many as the request allows; a number needs as many steps as it says. Its weights are 1000 bytes on
# each of 2 workers. A stream has one piece, after the canvases in steps.json; such requests, and
# what plugins it was started with, are kept in asked.jsonl.
STUB = r"""
import http.server, json, os, pathlib, sys, threading
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
answers = json.loads((folder / "answers.json").read_text())
temperature = json.loads((folder / "config.json").read_text()).get("temperature", 1.0)
lock, done, forwards = threading.Lock(), 0, 0

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, text, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        if self.path == "/v1/models":
            model = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
            return self.reply(json.dumps({"object": "list", "data": [model]}))
        counts = {"vllm:generation_tokens_total": 50 * done,
            "vllm:diffusion_num_denoising_steps_total": forwards,
            "vllm_dllm:block_denoise_steps_sum": forwards - 2 * done,
            "vllm_dllm:block_denoise_steps_count": 2 * done}
        self.reply("".join(f'{k}{{engine="0"}} {v}\n' for k, v in counts.items()))
    def stream(self, body):
        asked = json.dumps({**body, "plugins": os.environ["VLLM_PLUGINS"]})
        with (folder / "asked.jsonl").open("a") as file:
            file.write(asked + "\n")
        chunk = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": "stub"}
        delta = {"index": 0, "delta": {"content": "cat"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        steps = json.loads((folder / "steps.json").read_text())
        pieces = [chunk | {"object": "vllm_dllm.canvas", "choices": [], "canvas": s} for s in steps]
        pieces += [chunk | {"choices": [delta]}, chunk | {"choices": [], "usage": usage}]
        lines = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
        self.reply(lines + "data: [DONE]\n\n", kind="text/event-stream")
    def do_POST(self):
        global done, forwards
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
            return self.reply(json.dumps({"results": 2 * [{"bytes": 1000}]}))
        if body.get("stream"):
            return self.stream(body)
        chat = self.path.startswith("/v1/chat")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        answer = next((a for q, a in answers.items() if prompt.endswith(q)), "what?")
        if answer == "DIE":
            print("RuntimeError: out of memory", flush=True)
            os._exit(9)
        if answer == "REFUSE":
            return self.reply("the prompt is too long", 400)
        assert prompt == "Hello" or body["temperature"] == temperature
        steps = body.get("vllm_xargs", {}).get("diffusion_max_steps", 3)
        if answer.isdigit() and steps < int(answer):
            answer = "cut"
        with lock:
            done += 1
            forwards += 2 * (steps + 1)
        choice = {"message": {"content": answer}} if chat else {"text": answer}
        self.reply(json.dumps({"choices": [{"index": 0, "finish_reason": "stop"} | choice]}))

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ROWS = {"Sort: b a": "a b", "Add 1 and 2.": "1+2=3, =3", "Hi!": "Hello!", "Reverse: x y": "y x"}
"""Prompts and right answers."""


def stub_command(checkpoint: Path, port: int, *options: str) -> list[str]:
    """In the place of `serve_command`."""
    return [sys.executable, "-c", STUB, str(checkpoint), str(port)]


def write_task(folder: Path, rows: Mapping[str, str]) -> None:
    """task.yaml: the shipped held-out task, of these prompts and right answers."""
    (folder / "task.yaml").write_text((CHECKPOINTS / "held_out.yaml").read_text())
    lines = [json.dumps({"messages": [{"content": q}], "answer": a}) for q, a in rows.items()]
    (folder / "held_out.jsonl").write_text("\n".join(lines) + "\n")


def write_checkpoint(
    folder: Path, answers: Mapping[str, str], architecture: str = DIFFUSION_GEMMA
) -> Path:
    """What `STUB` serves: weights of 3000 zeros, and these answers by a prompt's end."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3000))
    (folder / "answers.json").write_text(json.dumps(answers))
    return folder
