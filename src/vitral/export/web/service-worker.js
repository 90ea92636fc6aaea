// Keeps the files of this page, so that it works without a network. The list and the version are filled in at export.
// A newer version waits until the page is closed everywhere: files of two versions are never mixed.
const FILES = /* files */ [];
const VERSION = /* version */ "";
const OWN = `vitral ${self.registration.scope} `; // other pages of the same host have caches, too
const CACHE = OWN + VERSION;

self.addEventListener("install", (event) => {
  const requests = FILES.map((file) => new Request(file, { cache: "no-cache" }));
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)));
});
self.addEventListener("activate", (event) => {
  const outdated = (names) => names.filter((name) => name.startsWith(OWN) && name !== CACHE);
  event.waitUntil(caches.keys().then((names) => Promise.all(outdated(names).map((name) => caches.delete(name)))));
});
self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  event.respondWith(caches.open(CACHE).then((cache) => cache.match(event.request, { ignoreSearch: true }))
    .then((kept) => kept || fetch(event.request)));
});
