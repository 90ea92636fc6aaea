// A worker that classifies pictures with onnxruntime-web: decode, preprocess, run.
// It gets { start: settings } once, which it answers with { loaded, total } and { ready }, then { id, picture }, which it
// answers with { id, result } or { id, error }.
import { decode, preprocess } from "./preprocess.js";
import * as ort from "./runtime/ort.js";

let settings, session;

async function download(name, onProgress) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name} could not be loaded (${response.status}); reload the page`);
  const reader = response.body.getReader(), parts = [];
  for (let part; !(part = await reader.read()).done; ) {
    parts.push(part.value);
    onProgress(part.value.length);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

// Some browsers, where they are set to resist fingerprinting, give pages wrong pixels.
function checkPixels() {
  const context = new OffscreenCanvas(16, 16).getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#123456";
  context.fillRect(0, 0, 16, 16);
  const same = context.getImageData(0, 0, 16, 16).data.every((value, i) => value === [0x12, 0x34, 0x56, 255][i % 4]);
  if (!same) throw new Error("this browser hides the pixels of pictures from pages; allow this page to read them");
}

async function start(given) {
  settings = given;
  checkPixels();
  let loaded = 0;
  const count = (bytes) => postMessage({ loaded: (loaded += bytes), total: settings.bytes });
  const [wasm, model] = await Promise.all([download("runtime/ort.wasm", count), download(settings.model, count)]);
  ort.env.wasm.wasmBinary = wasm.buffer;
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
  ort.env.logLevel = "error";
  session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
  postMessage({ ready: true });
}

async function classify(picture) {
  const original = await decode(picture, settings.channels).catch(() => {
    throw new Error("this browser cannot read the file as a picture");
  });
  const { image, box } = preprocess(original, settings.steps);
  const pixels = new Uint8Array(image.data.buffer, image.data.byteOffset, image.data.length);
  const input = new ort.Tensor("uint8", pixels, [1, image.height, image.width, image.channels]);
  const { probabilities, attention } = await session.run({ pixels: input });
  const order = [...probabilities.data.keys()].sort((a, b) => probabilities.data[b] - probabilities.data[a]);
  const classes = order.slice(0, settings.top).map((index) => [index, probabilities.data[index]]);
  if (!attention) return { classes };
  const [, rows, columns] = attention.dims;
  return { classes, attention: { rows, columns, values: [...attention.data], box } };
}

onmessage = async ({ data }) => {
  try {
    if (data.start) await start(data.start);
    else postMessage({ id: data.id, result: await classify(data.picture) });
  } catch (error) {
    postMessage({ id: data.id, error: String(error.message || error) });
  }
};
