"""The page of an endpoint on which a person tries the model. It loads nothing from elsewhere. Who serves it is serving/api.py."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>headway endpoint</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body{font:16px system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem}
textarea,pre{width:100%;box-sizing:border-box;font:14px ui-monospace,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #999;padding:.6rem;min-height:4rem}
label{margin-right:1rem;white-space:nowrap}input[type=number]{width:5rem}#told{color:#777;font-size:14px}</style>
<h1>Try the model</h1><p id="model"></p>
<form id="form"><textarea id="prompt" rows="5" aria-label="prompt">def </textarea>
<p><label>tokens <input id="tokens" type="number" min="1" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0"></label>
<label>API key <input id="key" type="password" autocomplete="off" placeholder="where one is asked for"></label></p>
<p><button id="complete">Complete</button> <button id="stop" type="button" disabled>Stop</button></p></form>
<pre id="said" aria-live="polite"></pre><p id="told"></p>
<script>
const by = id => document.getElementById(id);
let asking = null;
fetch("readyz").then(r => r.json()).then(s => by("model").textContent = s.ready ? s.model
  : (s.model || "") + " (not ready" + (s.reason ? ": " + s.reason : "") + ")");
by("stop").onclick = () => asking && asking.abort();
by("form").onsubmit = async event => {
  event.preventDefault();
  if (asking) asking.abort();
  const mine = asking = new AbortController(), prompt = by("prompt").value, began = performance.now();
  by("said").textContent = "…"; by("told").textContent = ""; by("stop").disabled = false;
  try { await ask(prompt, mine.signal, began); }
  catch (error) { if (error.name !== "AbortError") by("told").textContent = "The server does not answer: " + error.message; }
  if (asking === mine) { asking = null; by("stop").disabled = true; }
};
async function ask(prompt, signal, began) {
  const headers = {"Content-Type": "application/json"}, key = by("key").value.trim();
  if (key) headers["Authorization"] = "Bearer " + key;
  const body = JSON.stringify({prompt, max_tokens: +by("tokens").value, temperature: +by("temperature").value,
    stream: true, stream_options: {include_usage: true}});
  const reply = await fetch("v1/completions", {method: "POST", headers, body, signal});
  if (!reply.ok) { by("said").textContent = (await reply.json()).error.message; return; }
  const rung = reply.headers.get("X-Headway-Degraded"), reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", usage = null, failed = null; by("said").textContent = prompt;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\\n\\n"); rest = lines.pop();
    for (const line of lines.filter(one => one.startsWith("data: {"))) {
      const said = JSON.parse(line.slice(6));
      failed = said.error || failed; usage = said.usage || usage;
      if (said.choices && said.choices.length) by("said").append(said.choices[0].text);
    }
  }
  const seconds = ((performance.now() - began) / 1000).toFixed(2), told = [];
  if (failed) told.push(failed.message);
  if (usage) told.push(usage.completion_tokens + " tokens in " + seconds + " s");
  if (rung) told.push("answered by the " + rung + " model: the full one is away");
  by("told").textContent = told.join(" · ");
}
</script></html>
"""
