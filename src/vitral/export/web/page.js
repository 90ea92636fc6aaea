// The page: pictures in, classes and attention out. `backend` (local.js or remote.js) runs the model.
(() => {
  const pictures = []; // { name, blob, image, result, error, item }
  let current = null, ready = false, busy = false;
  const say = (text) => { $("status").textContent = text; };
  const element = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const sentence = (text) => text.replace(/\.?$/, ".");
  const plural = (count) => `${count} picture${count === 1 ? "" : "s"}`;

  async function add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/") || !file.type);
    if (files.length && !images.length) say("That is not a picture.");
    for (const blob of images) {
      const picture = { name: blob.name || "pasted picture", blob, image: new Image() };
      picture.image.src = URL.createObjectURL(blob);
      picture.image.alt = "";
      picture.item = thumbnail(picture);
      pictures.push(picture);
      $("strip").append(picture.item);
    }
    if (images.length) choose(pictures.at(-images.length));
    if (images.length && $("result").getBoundingClientRect().top > 0.6 * innerHeight) $("result").scrollIntoView();
    await work();
  }

  function thumbnail(picture) {
    const item = element("label", "thumb waiting");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "picture" });
    input.addEventListener("change", () => choose(picture));
    picture.label = element("span", "", picture.name);
    item.append(input, picture.image, picture.label);
    return item;
  }

  // One picture after the other, in the order they came.
  async function work() {
    if (!ready || busy) return;
    busy = true;
    for (let next; (next = pictures.find((picture) => !picture.result && !picture.error)); ) {
      say(`Classifying ${next.name} …`);
      const started = performance.now(), model = chosenModel();
      try {
        const result = await backend.classify(next.blob, model);
        if (model !== chosenModel()) continue; // another one was chosen meanwhile
        next.result = result;
        next.milliseconds = performance.now() - started;
        await next.image.decode().catch(() => {});
      } catch (error) {
        next.error = error.message;
      }
      label(next);
      if (next === current) show();
      say(summary());
    }
    busy = false;
  }

  function label(picture) {
    picture.item.classList.toggle("waiting", !picture.result && !picture.error);
    picture.item.classList.toggle("failed", Boolean(picture.error));
    const [best] = picture.result?.classes || [];
    picture.label.textContent = best ? `${best.name}, ${percent(best.probability)}` : picture.error || picture.name;
  }

  // Said aloud by screen readers: the chosen picture's best class.
  function summary() {
    const waiting = pictures.filter((picture) => !picture.result && !picture.error).length;
    const rest = waiting ? ` ${plural(waiting)} to go.` : "";
    const last = current?.result ? current : pictures.find((picture) => picture.result);
    if (!last) return current?.error ? sentence(`${current.name}: ${current.error}`) : "Ready.";
    const [{ name, probability }] = last.result.classes;
    return `${last.name}: ${name}, ${percent(probability)}, in ${Math.round(last.milliseconds)} ms.${rest}`;
  }

  function choose(picture) {
    current = picture || null;
    $("result").hidden = document.querySelector("nav a[href='#result']").hidden = !current;
    if (!current) return;
    current.item.querySelector("input").checked = true;
    show();
  }

  function show() {
    const { result, error, name } = current;
    const rows = (result?.classes || []).map(({ name: title, probability }) => {
      const row = document.createElement("li");
      row.style.setProperty("--share", probability);
      row.append(element("span", "", title), element("b", "", percent(probability)));
      return row;
    });
    const caption = element("li", "caption");
    caption.append(element("bdi", "", name), error ? sentence(`: ${error}`) : result ? "" : " is waiting …");
    $("answers").replaceChildren(...rows, caption);
    $("attention").hidden = $("legend").hidden = !result?.attention;
    $("stage").setAttribute("aria-label", result ? `${name}, with the attention of the model` : name);
    describe(result?.attention);
    draw();
  }

  function describe(attention) {
    $("looked").hidden = !attention;
    if (!attention) return;
    const { values, rows, columns } = attention;
    const best = values.indexOf(Math.max(...values)), third = (at, size, names) => names[Math.floor((3 * (at + 0.5)) / size)];
    const down = third(Math.floor(best / columns), rows, ["upper", "middle", "lower"]);
    const across = third(best % columns, columns, ["left", "centre", "right"]);
    const sorted = [...values].sort((a, b) => b - a);
    let count = 0;
    for (let sum = 0; sum < 0.5 && count < sorted.length; ) sum += sorted[count++];
    $("looked").textContent = `The model looked most at the ${down} ${across} of what it saw. Half of its attention is on `
      + `${count} of ${values.length} patches. It saw what lies inside the frame.`;
  }

  // The map as an image of one pixel per patch. Square roots: a few weights are large and many are small.
  function cells({ values, rows, columns }, strength) {
    const small = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const pixels = new ImageData(columns, rows), most = Math.max(...values);
    values.forEach((value, i) => {
      const share = Math.sqrt(Math.max(0, value / most)), at = 3 * Math.round(255 * share);
      pixels.data.set([RAMP[at], RAMP[at + 1], RAMP[at + 2], 255 * strength * (0.4 + 0.6 * share)], 4 * i);
    });
    small.getContext("2d").putImageData(pixels, 0, 0);
    return small;
  }

  function draw() {
    const { image, result } = current, stage = $("stage");
    if (!image.complete || !image.naturalWidth) {
      stage.width = stage.height = 0;
      image.addEventListener("load", () => current?.image === image && draw(), { once: true });
      return;
    }
    const scale = 1000 / Math.max(image.naturalWidth, image.naturalHeight);
    stage.width = Math.max(1, Math.round(image.naturalWidth * scale));
    stage.height = Math.max(1, Math.round(image.naturalHeight * scale));
    const context = stage.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, stage.width, stage.height);
    const strength = $("strength").value / 100;
    $("strength-said").textContent = `${$("strength").value} %`;
    if (!result?.attention || !strength) return;
    const [left, top, width, height] = result.attention.box;
    const box = [left * stage.width, top * stage.height, width * stage.width, height * stage.height];
    const outside = new Path2D();
    outside.rect(0, 0, stage.width, stage.height);
    outside.rect(...box);
    context.fillStyle = `rgb(0 0 0 / ${0.5 * strength})`;
    context.fill(outside, "evenodd");
    context.imageSmoothingEnabled = $("smooth").checked;
    context.drawImage(cells(result.attention, strength), ...box);
    context.strokeStyle = "#fff";
    context.lineWidth = 2;
    context.strokeRect(box[0] + 1, box[1] + 1, box[2] - 2, box[3] - 2);
  }

  function remove(picture) {
    const index = pictures.indexOf(picture), hadFocus = $("result").contains(document.activeElement);
    pictures.splice(index, 1);
    picture.item.remove();
    URL.revokeObjectURL(picture.image.src);
    choose(pictures[Math.min(index, pictures.length - 1)]);
    say(plural(pictures.length) + ".");
    if (hadFocus && !current) $("files").focus();
  }

  const chosenModel = () => backend.models[$("model").selectedIndex] || backend.models[0];
  function offerModels() {
    $("model").replaceChildren(...backend.models.map(({ name }) => new Option(name, name)));
    $("models").hidden = backend.models.length < 2;
    $("model").addEventListener("change", () => {
      for (const picture of pictures) picture.result = picture.error = undefined;
      pictures.forEach(label);
      if (current) show();
      work();
    });
  }

  // The camera: a frame at its full size becomes a picture like any other.
  let stream = null, facing = "environment";
  async function openCamera() {
    stopCamera();
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: facing, width: 1920, height: 1080 } });
    } catch (error) {
      $("dialog").close();
      say(error.name === "NotAllowedError" ? "The camera may not be used: allow it for this page." : "No camera was found.");
      return;
    }
    $("video").srcObject = stream;
    if (!$("dialog").open) $("dialog").showModal();
    await $("video").play();
  }
  function stopCamera() {
    for (const track of stream?.getTracks() || []) track.stop();
    stream = null;
  }
  function takePicture() {
    const video = $("video"), canvas = document.createElement("canvas");
    Object.assign(canvas, { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const name = `camera ${new Date().toLocaleTimeString()}`;
    canvas.toBlob((blob) => add([new File([blob], name, { type: blob.type })]), "image/png");
    $("dialog").close();
  }

  $("camera").hidden = !navigator.mediaDevices?.getUserMedia;
  $("camera").addEventListener("click", openCamera);
  $("shoot").addEventListener("click", takePicture);
  $("turn").addEventListener("click", () => { facing = facing === "user" ? "environment" : "user"; openCamera(); });
  $("close").addEventListener("click", () => $("dialog").close());
  $("dialog").addEventListener("close", stopCamera);
  $("files").addEventListener("change", () => { add($("files").files); $("files").value = ""; });
  $("remove").addEventListener("click", () => remove(current));
  $("clear").addEventListener("click", () => [...pictures].forEach(remove));
  for (const id of ["strength", "smooth"]) $(id).addEventListener("input", () => current && draw());
  addEventListener("paste", (event) => add(event.clipboardData.files));
  addEventListener("dragover", (event) => { event.preventDefault(); root.classList.add("dragging"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) root.classList.remove("dragging"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    root.classList.remove("dragging");
    add(event.dataTransfer.files);
  });
  drawRamp($("ramp"));
  choose(null);

  backend.start((loaded, total) => {
    $("progress").hidden = false;
    $("progress").value = loaded / total;
    say(loaded < total ? `Loading the model, ${(total / 1e6).toFixed(1)} MB …` : "Preparing the model …");
  }).then(() => {
    offerModels();
    ready = true;
    say("Ready: add a picture.");
    return work();
  }, (error) => say(sentence(`The model cannot be used: ${error.message}`))).finally(() => { $("progress").hidden = true; });
})();
