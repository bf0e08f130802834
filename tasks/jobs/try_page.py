"""The page of an endpoint on which a person tries the model. It loads nothing from elsewhere. Who serves it is serve.py."""

PAGE = """<!doctype html><meta charset="utf-8"><title>headway endpoint</title>
<style>body{font:16px system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem}
textarea,pre{width:100%;box-sizing:border-box;font:14px ui-monospace,monospace}
pre{white-space:pre-wrap;border:1px solid #999;padding:.6rem;min-height:4rem}label{margin-right:1rem}</style>
<h1>Try the model</h1><p id="model"></p>
<form id="form"><textarea id="prompt" rows="5" aria-label="prompt">def </textarea>
<p><label>tokens <input id="tokens" type="number" min="1" max="512" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0"></label>
<button>Complete</button></p></form><pre id="said" aria-live="polite"></pre>
<script>
const by = id => document.getElementById(id);
fetch("readyz").then(r => r.json()).then(s => by("model").textContent = s.model + (s.ready ? "" : " (not ready)"));
by("form").onsubmit = async event => {
  event.preventDefault(); by("said").textContent = "…";
  const body = {prompt: by("prompt").value, max_tokens: +by("tokens").value, temperature: +by("temperature").value};
  const reply = await fetch("v1/completions",
    {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});
  const said = await reply.json();
  by("said").textContent = said.error ? said.error.message : body.prompt + said.choices[0].text;
};
</script>
"""
