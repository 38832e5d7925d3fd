// Charts, the theme and the light that says whether the page is live. Everything else is htmx.
(function () {
  "use strict";
  const STREAM = document.currentScript.dataset.stream; // address of stream.js
  const COLOURS = ["--accent", "--blue", "--amber"];
  const plots = new Map(); // figure -> {plot, chart}

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function shown(value) {
    if (value === null || value === undefined) return "–";
    if (Math.abs(value) >= 10000) return (value / 1000).toFixed(1) + "k";
    return Math.abs(value) >= 100 ? value.toFixed(0) : String(+value.toPrecision(3));
  }

  function clock(seconds) {
    const at = new Date(seconds * 1000);
    const two = (n) => String(n).padStart(2, "0");
    return two(at.getHours()) + ":" + two(at.getMinutes()) + (at.getSeconds() ? ":" + two(at.getSeconds()) : "");
  }

  function axis(time) {
    const look = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const left = { ...look, size: 46, values: (_, ticks) => ticks.map(shown) };
    const below = (_, ticks) => ticks.map(time ? clock : (tick) => (Number.isInteger(tick) ? shown(tick) : ""));
    return [{ ...look, grid: { show: false }, size: 24, space: time ? 60 : 40, values: below }, left];
  }

  function options(figure, width) {
    const time = figure.dataset.time === "yes";
    const names = figure.dataset.series.split("|");
    const series = names.map((name, i) => ({
      label: name, stroke: colour(COLOURS[i % COLOURS.length]), width: 1.75, spanGaps: true,
      points: { show: (plot, at) => plot.data[at].filter((each) => each !== null).length === 1 }, // one makes no line
      value: (_, value) => shown(value),
    }));
    return {
      width, height: 150, padding: [8, 6, 0, 0],
      scales: { x: { time }, y: { range: (_, low, high) => range(low, high, time) } },
      axes: axis(time), legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      hooks: { setCursor: [(plot) => tell(figure, plot, plot.cursor.idx)] },
      series: [{}, ...series],
    };
  }

  function range(low, high, fromZero) {
    if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
    const bottom = fromZero ? 0 : low;
    const room = (high - bottom || Math.abs(high) || 1) * 0.08;
    return fromZero ? [0, Math.max(1, high + room)] : [bottom - room, high + room];
  }

  // The figures at the cursor, or the newest ones, in words: also for those who do not see the curve.
  function tell(figure, plot, index) {
    const names = figure.dataset.series.split("|");
    const unit = figure.dataset.unit;
    const out = figure.querySelector("output");
    const known = names.map((_, i) => i).filter((i) => plot.data[i + 1].some((value) => value !== null));
    const parts = known.map((i) => {
      const name = names[i];
      const values = plot.data[i + 1];
      const newest = index === null || index === undefined;
      const value = newest ? values.findLast((each) => each !== null) : values[index];
      const item = document.createElement("span");
      item.className = "s" + i;
      item.textContent = (names.length > 1 ? name + " " : "") + shown(value) + (unit && i === 0 ? " " + unit : "");
      return item;
    });
    out.replaceChildren(...parts);
  }

  function draw(figure, chart) {
    if (!chart || !chart.series.some((values) => values.some((value) => value !== null))) return;
    const box = figure.querySelector(".plot");
    const data = [chart.x, ...chart.series];
    const known = plots.get(figure);
    if (known) {
      known.chart = chart;
      known.plot.setData(data);
      if (known.plot.cursor.idx === null) tell(figure, known.plot, null);
      return;
    }
    box.replaceChildren();
    const plot = new uPlot(options(figure, box.clientWidth), data, box);
    plots.set(figure, { plot, chart });
    tell(figure, plot, null);
  }

  function redraw() {
    for (const [figure, known] of [...plots]) {
      known.plot.destroy();
      plots.delete(figure);
      draw(figure, known.chart);
    }
  }

  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    const target = event.target;
    if (target.dataset.curves !== "yes") return;
    event.preventDefault();
    const charts = JSON.parse(event.detail.data);
    for (const figure of target.querySelectorAll("[data-chart]")) draw(figure, charts[figure.dataset.chart]);
  });

  const live = document.getElementById("live");
  function say(text, kind) {
    if (!live) return;
    live.textContent = text;
    live.className = "pill " + kind;
  }
  document.addEventListener("htmx:sseOpen", () => say("live", "on"));
  document.addEventListener("htmx:sseError", () => say("reconnecting", "off"));

  // Names of events that earlier streams of this page had listeners for. The extension adds those of a new stream once it
  // is open, and by then the first events may have come, which the server sends only once.
  const listened = new Set();

  // What the extension uses of an EventSource, which is in a worker (stream.js).
  class Stream extends EventTarget {
    constructor(url) {
      super();
      this.readyState = EventSource.CONNECTING;
      this.worker = new Worker(STREAM);
      this.worker.onmessage = ({ data: { type, data, state } }) => {
        this.readyState = state;
        if (state === EventSource.CLOSED) this.close(); // the extension makes another one
        const event = new MessageEvent(type, { data });
        if (type === "open") this.onopen(event);
        else if (type === "error") this.onerror(event);
        else this.dispatchEvent(event);
      };
      this.worker.onerror = (event) => { this.close(); this.onerror(event); }; // its script did not load
      this.worker.postMessage({ url, names: [...listened] });
    }

    addEventListener(name, listener) {
      super.addEventListener(name, listener);
      listened.add(name);
      this.worker.postMessage({ names: [name] });
    }

    close() {
      this.worker.terminate();
      this.readyState = EventSource.CLOSED;
    }
  }

  // A browser has six connections to a server for all its tabs: one that nobody looks at gives its own back.
  const HIDDEN_MS = 5000;
  let source = null;
  let hiding = 0;
  htmx.createEventSource = (url) => (source = new Stream(url));
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (!source) return;
    if (document.hidden) {
      hiding = setTimeout(() => { source.close(); say("paused", ""); }, HIDDEN_MS);
    } else if (source.readyState === EventSource.CLOSED) {
      source.onerror(new Event("error")); // the extension connects anew
    }
  });

  const here = document.querySelector("nav [aria-current]");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 60; // on a phone the menu is wider

  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : dark.matches;
  }
  function label() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Use the " + button.textContent.toLowerCase() + " theme");
  }
  button.hidden = false;
  label();
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("parallm-theme", next);
    label();
    redraw();
  });
  dark.addEventListener("change", () => { label(); redraw(); });

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 150);
  });
})();
