// The model runs in this browser: pictures never leave it.
const backend = {
  models: [data.model],
  async start(onProgress) {
    const worker = new Worker("worker.js", { type: "module" });
    const waiting = new Map();
    await new Promise((resolve, reject) => {
      worker.onerror = (event) => reject(new Error(event.message || "the page's files could not be loaded"));
      worker.onmessage = ({ data: answer }) => {
        if (answer.total) onProgress(answer.loaded, answer.total);
        else if (answer.ready) resolve();
        else if (answer.id === undefined) reject(new Error(answer.error));
        else {
          const { done, failed } = waiting.get(answer.id);
          waiting.delete(answer.id);
          if (answer.error) failed(new Error(answer.error));
          else done(answer.result);
        }
      };
      worker.postMessage({ start: data.settings });
    });
    let count = 0;
    this.ask = (picture) => new Promise((done, failed) => {
      const id = count++;
      waiting.set(id, { done, failed });
      worker.postMessage({ id, picture });
    });
    // After the first visit the page works without a network, wherever browsers allow that (https and localhost).
    if ("serviceWorker" in navigator) navigator.serviceWorker.register("service-worker.js").catch(() => {});
  },
  async classify(picture) {
    const { classes, attention } = await this.ask(picture);
    return { classes: classes.map(([index, probability]) => ({ name: data.classes[index], probability })), attention };
  },
};
