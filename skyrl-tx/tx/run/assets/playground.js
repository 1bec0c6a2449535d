// Texts of models are untrusted: they enter the page as text only.
const at = (id) => document.getElementById(id);

async function ask(name, body) {
  const options = body && {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)};
  const answer = await fetch(`/playground/${name}`, options);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.detail ?? `status ${answer.status}`);
  return found;
}

function add(parent, tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return parent.appendChild(element);
}

async function list() {
  const {data} = await ask("models");
  const {checkpoints} = await ask("checkpoints");
  const paths = checkpoints.filter((one) => one.checkpoint_type !== "external").map((one) => one.tinker_path);
  for (const path of [...paths, ...data.map((one) => one.id)]) add(at("model"), "option", path);
  at("state").textContent = `${paths.length} checkpoints of this key`;
}

async function sample(event) {
  event.preventDefault();
  at("ask").disabled = true;
  at("state").textContent = "Sampling …";
  const body = {model: at("model").value, prompt: at("prompt").value};
  for (const name of ["max_tokens", "temperature", "n"]) body[name] = Number(at(name).value);
  try {
    const {choices} = await ask("completions", body);
    at("samples").replaceChildren();
    for (const choice of choices) add(at("samples"), "pre", `${choice.text}\n[${choice.finish_reason}]`);
    at("state").textContent = "";
  } catch (error) {
    at("state").textContent = error.message;
  }
  at("ask").disabled = false;
}

at("form").addEventListener("submit", sample);
list().catch((error) => (at("state").textContent = error.message));
