"""A body that vLLM's checks take for something else is the client's mistake, not the server's."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.launchers import app as server
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from vllm_dllm.compat import http
from vllm_dllm.requests.http import check_request_body, wrong_type_error


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(http, "is_server", lambda: True)
    http.check_bodies(check_request_body, wrong_type_error)
    http.check_bodies(check_request_body, wrong_type_error)
    monkeypatch.undo()
    server.init_exception_handler(app)

    @app.post("/chat")
    def chat(body: ChatCompletionRequest) -> None: ...

    @app.post("/completion")
    def completion(body: CompletionRequest) -> None: ...

    @app.post("/ours")
    def ours(body: CompletionRequest) -> Any:
        return {}["a mistake of the server's"]

    return TestClient(app, raise_server_exceptions=False)


def post(client: TestClient, path: str, member: str) -> tuple[int, dict[str, Any]]:
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "prompt": "Hi", {member}}}'
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    return answer.status_code, (answer.json() or {}).get("error", {})


@pytest.mark.parametrize("value", ["NaN", "5", '"json"', "[1]", "true"])
@pytest.mark.parametrize("path", ["/chat", "/completion"])
def test_structured_outputs_of_another_type(client: TestClient, path: str, value: str) -> None:
    status, error = post(client, path, f'"structured_outputs": {value}')
    assert status == 400, error
    assert error["param"] == "structured_outputs"
    assert error["message"].startswith("structured_outputs has another type than is expected, got")


def test_a_body_that_is_no_object(client: TestClient) -> None:
    answer = client.post("/completion", content="[1]", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_other_errors_keep_their_status(client: TestClient) -> None:
    """Also where vLLM quotes a number that JSON has not."""
    assert post(client, "/completion", '"n": 1')[0] == 200
    for wrong in ('"n": "many"', '"max_tokens": NaN'):
        assert post(client, "/completion", wrong)[0] == 400
    assert post(client, "/ours", '"n": 1')[0] == 500
