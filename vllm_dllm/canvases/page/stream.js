// The server's API, as far as the page needs it.

// One level up: the page is at /canvas/, also behind a proxy that adds a prefix.
const API = new URL("../v1/", document.baseURI);

function headers(key) {
  // An abbreviated key, or letters of another keyboard: the browser would name a code page.
  if (/[^\x20-\x7e\xa0-\xff]/.test(key)) {
    throw new Error("An API key cannot have such letters. Enter it again.");
  }
  return {
    "Content-Type": "application/json",
    ...(key ? { Authorization: `Bearer ${key}` } : {}),
  };
}

// As `fetch` does. Its own error says nothing of a server.
async function ask(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The server does not answer. Is it running? (${error.message})`);
  }
}

async function complaint(response, key) {
  if (response.status === 401) {
    return key ? "The server refuses this API key." : "The server wants an API key: enter it in the form.";
  }
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status}: ${text.slice(0, 300)}`;
  }
}

// Examples for the model, and the rules that it knows.
export async function readAbout() {
  const response = await fetch(new URL("about.json", document.baseURI));
  return { examples: [], acceptance: [], ...(response.ok ? await response.json() : {}) };
}

export async function readModel(key) {
  const response = await ask(new URL("models", API), { headers: headers(key) });
  if (!response.ok) throw new Error(await complaint(response, key));
  return (await response.json()).data[0].id;
}

// The data of server-sent events, wherever their bytes were cut.
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}

// Chunks of a chat: the answer's and the canvases.
export async function* streamChat(body, settings, key, signal) {
  const response = await ask(new URL("chat/completions", API), {
    method: "POST",
    headers: headers(key),
    signal,
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      vllm_xargs: { ...settings, diffusion_stream_canvases: true },
    }),
  });
  if (!response.ok) throw new Error(await complaint(response, key));
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    yield chunk;
  }
  throw new Error("The stream ended before the answer.");
}
