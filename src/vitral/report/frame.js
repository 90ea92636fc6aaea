"use strict";
// What all pages share: values, light and dark, edges of what scrolls, the colours of maps.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const percent = (value) => (100 * value).toFixed(value < 0.0995 ? 1 : 0) + "\u00a0%";

// Light or dark: the system setting, until the button is used.
const root = document.documentElement;
const isDark = () =>
  root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
$("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; });

// The edges of what scrolls fade where there is more, but not the scrollbars beside them.
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => {
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.classList.toggle("more-below", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
    box.style.setProperty("--bar-x", `${box.offsetWidth - box.clientWidth}px`);
    box.style.setProperty("--bar-y", `${box.offsetHeight - box.clientHeight}px`);
  };
  box.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(box);
}

const RAMP = makeRamp([[4, 4, 20], [72, 18, 104], [176, 46, 94], [244, 128, 42], [252, 246, 170]]);

function makeRamp(stops) {
  const ramp = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    for (let c = 0; c < 3; c++)
      ramp[3 * i + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
  }
  return ramp;
}

// The colours as a legend: a canvas of 256 pixels.
function drawRamp(canvas) {
  const context = canvas.getContext("2d");
  for (let i = 0; i < 256; i++) {
    context.fillStyle = `rgb(${RAMP.slice(3 * i, 3 * i + 3).join(",")})`;
    context.fillRect(i, 0, 1, 1);
  }
}
