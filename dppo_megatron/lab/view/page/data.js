// What the page holds: base64 of gzip in script elements, most of it safetensors. Nothing is fetched.

const KINDS = { U8: Uint8Array, I32: Int32Array, F32: Float32Array };

async function load(blob) {
  const name = `blob-${blob}`;
  if (!document.getElementById(name) && document.readyState === "loading")
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  const text = atob(document.getElementById(name).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).arrayBuffer();
}

async function loadJson(name) {
  return JSON.parse(new TextDecoder().decode(await load(name)));
}

// {name: typed array}; what the file says of itself is in `of`.
async function loadTensors(name) {
  const buffer = await load(name);
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const found = { of: header.__metadata__ ? JSON.parse(header.__metadata__.of) : null };
  delete header.__metadata__;
  for (const [key, { dtype, data_offsets: [begin, end] }] of Object.entries(header)) {
    const Kind = KINDS[dtype];
    found[key] = new Kind(buffer, 8 + size + begin, (end - begin) / Kind.BYTES_PER_ELEMENT);
  }
  return found;
}

const byId = (id) => document.getElementById(id);

// What is chosen on the page is in its address, so a link to a rollout, or a reload, shows the same.
const address = new URLSearchParams(location.hash.slice(1));
let pending;
const saveAddress = (state) => history.replaceState(state, "", `#${address}`);

function keep(key, value) {
  if (value) address.set(key, value);
  else address.delete(key);
  clearTimeout(pending);
  pending = setTimeout(saveAddress, 200, null); // browsers limit the rate
}

// Controls that reverse the text after them, or hide, as escapes.
function safe(text) {
  return text.replace(/[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// An element with a class and children; strings become text and never HTML.
function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child.nodeType ? child : safe(String(child)))));
  return element;
}

function makeButton(label, on, act) {
  const button = make("button", on ? "on" : "", label);
  button.setAttribute("aria-pressed", on);
  button.addEventListener("click", act);
  return button;
}

// A share is shown in percent.
function shown(value, share) {
  if (share && Number.isFinite(value)) return `${shown(100 * value)} %`;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}
