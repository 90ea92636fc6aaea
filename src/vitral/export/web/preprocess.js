// Preprocessing as in vitral.data.preprocess, in plain JavaScript on bytes: the same bits wherever decoders agree.
// An image is { data, height, width, channels }, its data a Uint8ClampedArray (height, width, channels).

const STRIP = 1 << 22; // pixels that are read at once: phones limit the size of a canvas, not of a picture
const MAX_ASPECT = 16; // a longer image is cut to its middle before it is enlarged

// Half to even, as Python rounds.
function even(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.floor(value + 0.5);
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));
function cubic(x) {
  x = Math.abs(x);
  const a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}
function hamming(x) {
  x = Math.abs(x);
  if (x === 0) return 1;
  return x >= 1 ? 0 : (Math.sin(x * Math.PI) / (x * Math.PI)) * (Math.fround(0.54) + Math.fround(0.46) * Math.cos(x * Math.PI));
}
const triangle = (x) => Math.max(0, 1 - Math.abs(x));
const FILTERS = { // [support, weight of a distance]
  bilinear: [1, triangle],
  bicubic: [2, cubic],
  pil_bilinear: [1, triangle],
  pil_bicubic: [2, cubic],
  pil_box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  pil_hamming: [1, hamming],
  pil_lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

// Integer weights of one axis, in units of 1 / 2^shift: PyTorch's have 15 bits, Pillow's a fixed shift of 22.
function axisTaps(before, after, method, antialias) {
  const [support, weight] = FILTERS[method];
  const scale = before / after, stretch = antialias ? Math.max(scale, 1) : 1, reach = support * stretch;
  const taps = [];
  let largest = 0;
  for (let i = 0; i < after; i++) {
    const center = scale * (i + 0.5);
    const first = Math.max(Math.trunc(center - reach + 0.5), 0);
    const end = Math.min(Math.trunc(center + reach + 0.5), before);
    const weights = [];
    for (let j = first; j < end; j++) weights.push(weight((j - center + 0.5) * (1 / stretch)));
    const sum = weights.reduce((total, value) => total + value, 0);
    for (let j = 0; j < weights.length; j++) {
      if (sum !== 0) weights[j] /= sum;
      largest = Math.max(largest, weights[j]);
    }
    taps.push({ first, weights });
  }
  let shift = 22;
  if (!method.startsWith("pil_")) while (Math.trunc(0.5 + largest * 2 ** shift) >= 2 ** 15) shift--;
  for (const tap of taps)
    tap.weights = Int32Array.from(tap.weights, (value) => Math.trunc(value * 2 ** shift + (value < 0 ? -0.5 : 0.5)));
  return { taps, shift };
}

// Weighted sums along one axis, rounded to bytes: of rows (`axis` 0) or of columns (1).
function resample(image, length, axis, method, antialias) {
  const { data, height, width, channels } = image;
  const before = axis ? width : height;
  if (before === length) return image;
  const { taps, shift } = axisTaps(before, length, method, antialias);
  const result = { data: null, height: axis ? height : length, width: axis ? length : width, channels };
  result.data = new Uint8ClampedArray(result.height * result.width * channels);
  const half = 2 ** (shift - 1), row = width * channels, step = axis ? channels : row;
  let at = 0;
  for (let y = 0; y < result.height; y++) {
    for (let x = 0; x < result.width; x++) {
      const { first, weights } = taps[axis ? x : y];
      const start = axis ? y * row + first * channels : first * row + x * channels;
      for (let c = 0; c < channels; c++) {
        let sum = half, from = start + c;
        for (let k = 0; k < weights.length; k++, from += step) sum += weights[k] * data[from];
        result.data[at++] = sum >> shift;
      }
    }
  }
  return result;
}

// Pixels picked by their row and column.
function pick({ data, width, channels }, rows, columns) {
  const result = new Uint8ClampedArray(rows.length * columns.length * channels);
  let at = 0;
  for (const y of rows)
    for (const x of columns)
      for (let c = 0; c < channels; c++) result[at++] = data[(y * width + x) * channels + c];
  return { data: result, height: rows.length, width: columns.length, channels };
}

const nearest = (before, after) => Array.from({ length: after }, (_, i) => Math.floor(((i + 0.5) * before) / after));

// Pillow adds the scale up, pixel after pixel.
function pillowNearest(before, after) {
  const scale = before / after, indices = [];
  for (let i = 0, at = scale * 0.5; i < after; i++, at += scale) indices.push(Math.min(Math.trunc(at), before - 1));
  return indices;
}

// Means over cells with fractional borders in float32, one axis after the other; rounded at the end.
function area(image, size) {
  let means = { ...image, data: Float32Array.from(image.data) };
  for (const axis of [0, 1]) means = cellMeans(means, size[axis], axis);
  return { ...means, data: Uint8ClampedArray.from(means.data, even) };
}

function cellMeans({ data, height, width, channels }, length, axis) {
  const before = axis ? width : height;
  const [high, wide] = axis ? [height, length] : [length, width];
  const means = new Float32Array(high * wide * channels);
  for (let k = 0; k <= Math.ceil(before / length); k++) {
    let at = 0;
    for (let y = 0; y < high; y++)
      for (let x = 0; x < wide; x++) {
        const cell = axis ? x : y, start = (cell * before) / length, end = ((cell + 1) * before) / length;
        const pixel = Math.trunc(start) + k, from = Math.min(pixel, before - 1);
        const covered = Math.max(Math.min(end, pixel + 1) - Math.max(start, pixel), 0);
        const share = Math.fround((covered * length) / before);
        const offset = (axis ? y * width + from : from * width + x) * channels;
        for (let c = 0; c < channels; c++, at++) means[at] += Math.fround(share * data[offset + c]);
      }
  }
  return { data: means, height: high, width: wide, channels };
}

function resize(image, size, { method, antialias, rows_first: mayStartWithRows }) {
  const [high, wide] = size, shrinks = image.height - high;
  if (shrinks === 0 && image.width === wide) return image;
  if (method === "area") return area(image, size);
  if (method === "nearest") return pick(image, nearest(image.height, high), nearest(image.width, wide));
  if (method === "pil_nearest") return pick(image, pillowNearest(image.height, high), pillowNearest(image.width, wide));
  // Pillow 13 starts with the rows where the height shrinks by far more than the width.
  const rowsFirst = mayStartWithRows && shrinks > 0 && shrinks > 2 * (image.width - wide);
  for (const axis of rowsFirst ? [0, 1] : [1, 0]) image = resample(image, size[axis], axis, method, antialias);
  return image;
}

function cut(image, top, left, [high, wide]) {
  const { data, width, channels } = image;
  if (high === image.height && wide === width) return image;
  const result = new Uint8ClampedArray(high * wide * channels);
  for (let y = 0; y < high; y++) {
    const from = ((top + y) * width + left) * channels;
    result.set(data.subarray(from, from + wide * channels), y * wide * channels);
  }
  return { data: result, height: high, width: wide, channels };
}

function pad(image, top, left, [high, wide], fill) {
  const { data, height, width, channels } = image;
  const result = new Uint8ClampedArray(high * wide * channels);
  for (let i = 0; i < result.length; i++) result[i] = fill[(i % channels) % fill.length];
  for (let y = 0; y < height; y++)
    result.set(data.subarray(y * width * channels, (y + 1) * width * channels), ((top + y) * wide + left) * channels);
  return { data: result, height: high, width: wide, channels };
}

// The size that an image of [height, width] gets.
function byRatio([height, width], ratio) {
  return [Math.max(even(height / ratio), 1), Math.max(even(width / ratio), 1)];
}
const SIDES = {
  resize_small: ([height, width], [high, wide]) =>
    high * width >= wide * height
      ? [high, Math.max(wide, even((width * high) / height))]
      : [Math.max(high, even((height * wide) / width)), wide],
  resize_short: ([height, width], [short]) =>
    width <= height ? [Math.trunc((short * height) / width), short] : [short, Math.trunc((short * width) / height)],
  resize_cover: (image, size) => byRatio(image, Math.min(image[0] / size[0], image[1] / size[1])),
  resize_fit: (image, size) => byRatio(image, Math.max(image[0] / size[0], image[1] / size[1])),
};

// Each step takes a view and gives the next: an image, and `box`, the part of the original that it shows
// ([left, top, width, height], in pixels of the original).
const resized = ({ image, box }, size, step) => ({ image: resize(image, size, step), box });

function cropped({ image, box }, top, left, size) {
  const [across, down] = [box[2] / image.width, box[3] / image.height];
  const part = [box[0] + left * across, box[1] + top * down, size[1] * across, size[0] * down];
  return { image: cut(image, top, left, size), box: part };
}

function padded({ image, box }, size, fill) {
  const canvas = [Math.max(image.height, size[0]), Math.max(image.width, size[1])];
  const top = Math.floor((canvas[0] - image.height) / 2), left = Math.floor((canvas[1] - image.width) / 2);
  const [across, down] = [box[2] / image.width, box[3] / image.height];
  const part = [box[0] - left * across, box[1] - top * down, canvas[1] * across, canvas[0] * down];
  return { image: pad(image, top, left, canvas, fill), box: part };
}

function inProportion(view, step) {
  const { height, width } = view.image, longest = MAX_ASPECT * Math.min(height, width);
  const middle = [Math.min(height, longest), Math.min(width, longest)];
  const trimmed = cropped(view, Math.floor((height - middle[0]) / 2), Math.floor((width - middle[1]) / 2), middle);
  return resized(trimmed, SIDES[step.name](middle, step.size), step);
}

const STEPS = {
  decode: (view) => view,
  resize: (view, step) => resized(view, step.size, step),
  resize_small: inProportion,
  resize_short: inProportion,
  resize_cover: inProportion,
  resize_fit: inProportion,
  pad: (view, step) => padded(view, step.size, step.numbers),
  central_crop(view, { size }) {
    const small = view.image.height < size[0] || view.image.width < size[1];
    const large = small ? inProportion(view, { name: "resize_small", size, method: "bilinear", antialias: true }) : view;
    const { height, width } = large.image;
    return cropped(large, Math.floor((height - size[0]) / 2), Math.floor((width - size[1]) / 2), size);
  },
  center_crop(view, { size }) {
    const large = padded(view, size, [0]), { height, width } = large.image;
    return cropped(large, even((height - size[0]) / 2), even((width - size[1]) / 2), size);
  },
};

// An image and the steps of a pipeline -> { image, box }; `box` in fractions of the original.
export function preprocess(image, steps) {
  let view = { image, box: [0, 0, image.width, image.height] };
  for (const step of steps) view = STEPS[step.name](view, step);
  const { width, height } = image, [left, top, wide, high] = view.box;
  return { image: view.image, box: [left / width, top / height, wide / width, high / height] };
}

// RGBA bytes -> an image of 1 channel (luminance, ITU-R 601 as in Pillow) or 3.
function fromRgba(rgba, height, width, channels) {
  const data = new Uint8ClampedArray(height * width * channels);
  for (let i = 0, from = 0, at = 0; i < height * width; i++, from += 4) {
    const red = rgba[from], green = rgba[from + 1], blue = rgba[from + 2];
    if (channels === 1) data[at++] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else {
      data[at++] = red;
      data[at++] = green;
      data[at++] = blue;
    }
  }
  return { data, height, width, channels };
}

// The pixels as they are stored, upright, over white; colour profiles are ignored as in Python.
export async function decode(picture, channels) {
  const bitmap = await createImageBitmap(picture, { colorSpaceConversion: "none", imageOrientation: "from-image" });
  const { width, height } = bitmap, strip = Math.max(1, Math.min(height, Math.floor(STRIP / width)));
  const context = new OffscreenCanvas(width, strip).getContext("2d", { willReadFrequently: true });
  const image = { data: new Uint8ClampedArray(width * height * channels), height, width, channels };
  for (let top = 0; top < height; top += strip) {
    const rows = Math.min(strip, height - top);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, strip);
    context.drawImage(bitmap, 0, -top);
    const part = fromRgba(context.getImageData(0, 0, width, rows).data, rows, width, channels);
    image.data.set(part.data, top * width * channels);
  }
  bitmap.close();
  return image;
}
