// A page's event stream, in a worker: as a request of the page itself, which never ends, it would keep headless tools
// waiting for the page to be loaded.
"use strict";
let source = null;

function pass(event) {
  postMessage({ type: event.type, data: event.data, state: source.readyState });
}

onmessage = ({ data: { url, names } }) => {
  if (url) {
    source = new EventSource(url);
    source.onopen = source.onerror = pass;
  }
  for (const name of names) source.addEventListener(name, pass); // adding one again changes nothing
};
