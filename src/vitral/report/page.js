(() => {
  // Sortable tables are sorted by a click on a column header.
  for (const head of document.querySelectorAll("table.sortable th button")) {
    head.addEventListener("click", () => {
      const cell = head.parentElement;
      const table = cell.closest("table");
      const rising = cell.getAttribute("aria-sort") !== "ascending";
      for (const other of cell.parentElement.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => row.children[cell.cellIndex].dataset.value;
      const compare = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b);
      const rows = [...table.tBodies[0].rows].sort((a, b) => (rising ? 1 : -1) * compare(key(a), key(b)));
      table.tBodies[0].append(...rows);
    });
  }

  // A confusion matrix of many classes is an image: the cell below the pointer is described in words.
  if (data.confusion) {
    const { names, block, cells } = data.confusion;
    const side = Math.ceil(names.length / block);
    const totals = new Array(names.length).fill(0), blocks = new Map();
    for (const cell of cells) {
      totals[cell[0]] += cell[2];
      const index = Math.floor(cell[0] / block) * side + Math.floor(cell[1] / block);
      blocks.set(index, [...(blocks.get(index) || []), cell]);
    }
    const matrix = $("matrix");
    const range = (row) => {
      const [first, last] = [row * block, Math.min((row + 1) * block, names.length) - 1];
      return first === last ? names[first] : `${names[first]} to ${names[last]}`;
    };
    const read = (event) => {
      const box = matrix.getBoundingClientRect();
      const at = (offset, size) => Math.min(Math.max(Math.floor((offset / size) * side), 0), side - 1);
      const row = at(event.clientY - box.top, box.height), column = at(event.clientX - box.left, box.width);
      const found = (blocks.get(row * side + column) || []).sort((a, b) => b[2] - a[2]);
      const words = found.slice(0, 4).map(([truth, guess, count]) =>
        `${names[truth]} predicted as ${names[guess]}: ${count} of ${totals[truth]}`);
      $("cell").textContent = words.join("; ") || `${range(row)} predicted as ${range(column)}: 0`;
    };
    matrix.addEventListener("pointermove", read);
    matrix.addEventListener("pointerdown", read);
  }

  if (!data.images) return;

  const [ROWS, COLUMNS] = data.grid;
  const N = ROWS * COLUMNS;
  const stage = $("stage"), overview = $("overview");
  const thumbs = [...document.querySelectorAll(".thumb")];
  const state = { image: 0, mode: "", layer: data.start, head: -1, pinned: -1, hover: -1 };
  const ABOUT = Object.fromEntries(
    [...document.querySelectorAll("input[name=mode]")].map((input) => [input.value, input.parentElement.title]));

  function bytes(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  // Decoded on first use: a page holds millions of weights, of which few are displayed.
  const opened = new Map();
  function open(name, part) {
    if (!opened.has(name)) opened.set(name, { steps: bytes(part.steps), high: new Float32Array(bytes(part.high).buffer) });
    return opened.get(name);
  }

  function row(part, number) {
    const values = new Float32Array(N);
    const scale = part.high[number] / 255;
    for (let i = 0; i < N; i++) values[i] = scale * part.steps[number * N + i];
    return values;
  }

  function mean(rows) {
    const values = new Float32Array(N);
    for (const one of rows) for (let i = 0; i < N; i++) values[i] += one[i] / rows.length;
    return values;
  }

  // The map of the class token (or of the patch average): embedded for every layer and head.
  function pooledMap(layer, head) {
    const part = open(`${state.image}/pooled`, data.images[state.image].pooled);
    const one = (h) => row(part, layer * data.heads + h);
    return head >= 0 ? one(head) : mean([...Array(data.heads).keys()].map(one));
  }

  // The map of a single patch, or null where its layer is not embedded.
  function patchMap(layer, head, patch) {
    const kept = data.images[state.image].rows[layer];
    if (!kept) return null;
    const part = open(`${state.image}/${layer}`, kept);
    if (kept.heads === 1) return row(part, patch);
    const one = (h) => row(part, h * N + patch);
    return head >= 0 ? one(head) : mean([...Array(kept.heads).keys()].map(one));
  }

  function chosenPatch() {
    return state.hover >= 0 ? state.hover : state.pinned;
  }

  // Values over the patches in the current mode; null for feature colours.
  function currentMap() {
    const image = data.images[state.image];
    if (state.mode === "colours") return null;
    if (state.mode !== "attention") return Float32Array.from(image.maps[state.mode]);
    const patch = chosenPatch();
    return patch < 0 ? pooledMap(state.layer, state.head) : patchMap(state.layer, state.head, patch);
  }

  function onlyMean() {
    const kept = data.images[state.image].rows?.[state.layer];
    return state.mode === "attention" && chosenPatch() >= 0 && kept && kept.heads === 1 && data.heads > 1;
  }

  function place(patch) {
    return `row ${Math.floor(patch / COLUMNS) + 1}, column ${(patch % COLUMNS) + 1}`;
  }

  function span(values) {
    let low = Math.min(...values), high = Math.max(...values);
    if (low >= 0 && state.mode !== "norms") low = 0;
    return [low, high > low ? high : low + 1];
  }

  // Attention has a few large weights and many small ones: their square roots are easier to tell apart.
  function bright(share) {
    return state.mode === "attention" ? Math.sqrt(Math.max(0, share)) : Math.max(0, share);
  }

  // The map as an image of one pixel per patch; without values, the feature colours.
  function cells(values, low, high, strength) {
    const small = document.createElement("canvas");
    small.width = COLUMNS;
    small.height = ROWS;
    const pixels = new ImageData(COLUMNS, ROWS);
    const tints = data.images[state.image].colours;
    for (let i = 0; i < N; i++) {
      const share = values ? bright((values[i] - low) / (high - low)) : 1;
      const from = values ? RAMP : tints, at = values ? 3 * Math.round(255 * share) : 3 * i;
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = from[at + c];
      pixels.data[4 * i + 3] = 255 * strength * (values ? 0.4 + 0.6 * share : 1);
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    return small;
  }

  // Stage pixels per image pixel.
  function enlargement(picture) {
    return Math.max(1, Math.round(896 / Math.max(picture.naturalWidth, picture.naturalHeight)));
  }

  function draw() {
    const picture = thumbs[state.image].querySelector("img");
    if (!picture.complete || !picture.naturalWidth) {
      picture.addEventListener("load", draw, { once: true });
      return;
    }
    const scale = enlargement(picture);
    stage.width = picture.naturalWidth * scale;
    stage.height = picture.naturalHeight * scale;
    const context = stage.getContext("2d");
    context.imageSmoothingEnabled = picture.naturalWidth >= 64;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, stage.width, stage.height);
    const values = currentMap();
    const [low, high] = values ? span(values) : [0, 1];
    if (values || state.mode === "colours") {
      context.imageSmoothingEnabled = $("smooth").checked;
      // The grid may end before the image (pixels that fill no patch) or, in a ResNet, after it.
      const side = data.side * scale;
      context.drawImage(cells(values, low, high, $("strength").value / 100), 0, 0, COLUMNS * side, ROWS * side);
    }
    outline(context, data.side * scale);
    legend(values, low, high);
    describe(values);
  }

  function outline(context, side) {
    const patch = chosenPatch();
    if (patch < 0) return;
    const box = [(patch % COLUMNS) * side, Math.floor(patch / COLUMNS) * side, side, side];
    const line = Math.max(2, stage.width / 220);
    context.lineWidth = 2 * line;
    context.strokeStyle = "#000a";
    context.strokeRect(...box);
    context.lineWidth = line;
    context.strokeStyle = "#fff";
    context.strokeRect(...box);
  }

  function said(value) {
    if (state.mode === "attention" || state.mode === "rollout") return percent(value);
    if (state.mode === "occlusion") return (100 * value).toFixed(1) + " points";
    return Number(value.toPrecision(3)).toString();
  }

  function legend(values, low, high) {
    document.querySelector(".legend").style.visibility = values ? "" : "hidden";
    $("least").textContent = said(low);
    $("most").textContent = said(high);
  }

  function describe(values) {
    $("about").textContent = ABOUT[state.mode];
    $("strength-said").textContent = `${$("strength").value} %`;
    const patch = chosenPatch();
    if (state.mode === "colours") {
      $("says").textContent = "Patches of similar colour have similar features, across all of these images.";
      return;
    }
    if (state.mode === "attention") describeAttention(values, patch);
    else {
      const best = values.indexOf(Math.max(...values));
      const own = patch >= 0 ? ` The patch at ${place(patch)} has ${said(values[patch])}.` : "";
      $("says").textContent = `Highest at ${place(best)}: ${said(values[best])}.${own}`;
    }
  }

  function describeAttention(values, patch) {
    const head = state.head < 0 || onlyMean() ? "mean of heads" : `head ${state.head + 1}`;
    $("layer-said").textContent = `${state.layer + 1} of ${data.layers}`;
    $("head-said").textContent = state.head < 0 ? `mean of ${data.heads}` : `${state.head + 1} of ${data.heads}`;
    for (const id of ["layer", "head"]) $(id).setAttribute("aria-valuetext", $(`${id}-said`).textContent);
    $("pooled").setAttribute("aria-pressed", String(state.pinned < 0));
    const who = patch < 0 ? data.pooled : `the patch at ${place(patch)}`;
    const where = `Layer ${state.layer + 1}, ${head}: ${who}`;
    if (!values) {
      const kept = Object.keys(data.images[state.image].rows).map((layer) => Number(layer) + 1).join(", ");
      $("says").textContent = `${where} is not embedded in this page. Single patches are embedded for layers ${kept || "none"}.`;
      return;
    }
    const best = values.indexOf(Math.max(...values));
    const total = values.reduce((sum, value) => sum + value, 0);
    const elsewhere = total < 0.98 ? ` About ${percent(1 - total)} goes to tokens other than patches.` : "";
    const note = onlyMean() && state.head >= 0 ? " Its single heads are not embedded in this page." : "";
    $("says").textContent = `${where} attends most to ${place(best)} (${percent(values[best])}).${elsewhere}${note}`;
  }

  let overviewOf = -1;
  function drawOverview() {
    overviewOf = state.image;
    overview.width = data.layers * (COLUMNS + 1) - 1;
    overview.height = data.heads * (ROWS + 1) - 1;
    const tall = Math.min(1, COLUMNS / ROWS);
    overview.parentElement.style.maxWidth = `${data.layers * Math.max(COLUMNS * 4, 56 * tall)}px`;
    overview.parentElement.style.minWidth = `${data.layers * 24 * tall}px`;
    const context = overview.getContext("2d");
    for (let layer = 0; layer < data.layers; layer++)
      for (let head = 0; head < data.heads; head++) {
        const values = pooledMap(layer, head);
        const tile = cells(values, 0, Math.max(...values) || 1, 1);
        context.fillStyle = "#040414";
        context.fillRect(layer * (COLUMNS + 1), head * (ROWS + 1), COLUMNS, ROWS);
        context.drawImage(tile, layer * (COLUMNS + 1), head * (ROWS + 1));
      }
  }

  // A frame around the tile of the chosen layer and head; around a whole column where heads are averaged.
  function markTile() {
    const share = (part, count) => `${(100 * part) / count}%`;
    Object.assign($("tile").style, {
      left: share(state.layer, data.layers),
      width: share(1, data.layers),
      top: share(Math.max(state.head, 0), data.heads),
      height: share(state.head < 0 ? data.heads : 1, data.heads),
    });
  }

  function answers() {
    const image = data.images[state.image];
    const list = $("answers");
    list.replaceChildren(...image.answers.map(([name, share]) => {
      const item = document.createElement("li");
      item.style.setProperty("--share", share);
      const label = document.createElement("span");
      label.textContent = name;
      const value = document.createElement("b");
      value.textContent = percent(share);
      if (image.truth.includes(name)) item.className = "true";
      item.append(label, value);
      return item;
    }));
    const caption = document.createElement("li");
    caption.className = "caption";
    // One bdi per name: a right-to-left name must not reorder its neighbours.
    const [own, ...truth] = [image.name, ...image.truth].map((name) => {
      const part = document.createElement("bdi");
      part.textContent = name;
      return part;
    });
    caption.append(own, ...truth.flatMap((part, i) => [i ? ", " : ", true class ", part]));
    list.append(caption);
  }

  function choose(change) {
    const before = state.image;
    Object.assign(state, change);
    if (state.image !== before) answers();
    if (state.mode === "attention" && overviewOf !== state.image) drawOverview();
    if (overview) {
      markTile();
      $("layer").value = state.layer + 1;
      $("head").value = state.head + 1;
      $("attention-controls").hidden = state.mode !== "attention";
      overview.closest(".overview").hidden = state.mode !== "attention";
    }
    draw();
  }

  function patchAt(event) {
    const box = stage.getBoundingClientRect();
    const picture = thumbs[state.image].querySelector("img");
    const column = Math.floor(((event.clientX - box.left) / box.width) * (picture.naturalWidth / data.side));
    const line = Math.floor(((event.clientY - box.top) / box.height) * (picture.naturalHeight / data.side));
    return column < 0 || line < 0 || column >= COLUMNS || line >= ROWS ? -1 : line * COLUMNS + column;
  }

  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  function onKey(event) {
    if (event.key === "Escape") choose({ pinned: -1, hover: -1 });
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const from = state.pinned >= 0 ? state.pinned : Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2);
    const line = Math.min(Math.max(Math.floor(from / COLUMNS) + move[0], 0), ROWS - 1);
    const column = Math.min(Math.max((from % COLUMNS) + move[1], 0), COLUMNS - 1);
    choose({ pinned: line * COLUMNS + column, hover: -1 });
  }

  stage.addEventListener("pointermove", (event) => {
    const hover = event.pointerType === "mouse" ? patchAt(event) : -1;
    if (hover !== state.hover) choose({ hover });
  });
  stage.addEventListener("pointerleave", () => choose({ hover: -1 }));
  stage.addEventListener("click", (event) => {
    const patch = patchAt(event);
    choose({ pinned: patch === state.pinned ? -1 : patch, hover: -1 });
  });
  stage.addEventListener("keydown", onKey);
  for (const id of ["strength", "smooth"]) $(id).addEventListener("input", draw);
  for (const input of document.querySelectorAll("input[name=image]"))
    input.addEventListener("change", () => choose({ image: Number(input.value), hover: -1 }));
  for (const input of document.querySelectorAll("input[name=mode]"))
    input.addEventListener("change", () => choose({ mode: input.value }));
  if (overview) {
    $("layer").addEventListener("input", (event) => choose({ layer: Number(event.target.value) - 1 }));
    $("head").addEventListener("input", (event) => choose({ head: Number(event.target.value) - 1 }));
    $("pooled").addEventListener("click", () => choose({ pinned: -1, hover: -1 }));
    overview.addEventListener("click", (event) => {
      const box = overview.getBoundingClientRect();
      const part = (at, size, count) => Math.min(Math.floor((at / size) * count), count - 1);
      choose({
        layer: part(event.clientX - box.left, box.width, data.layers),
        head: part(event.clientY - box.top, box.height, data.heads),
        pinned: -1,
      });
    });
  }

  drawRamp($("ramp"));
  state.image = Number(document.querySelector("input[name=image]:checked").value);
  state.mode = document.querySelector("input[name=mode]:checked").value;
  answers();
  choose({});
})();
