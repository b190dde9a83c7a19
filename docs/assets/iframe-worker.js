// Search in pages that are opened from the disk. The theme searches in a Worker, which browsers refuse to start from
// file:// addresses. There this class takes its place: it runs the same script in a hidden frame of the page. The script
// looks for the name IFrameWorker to learn that it runs in a frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title>";
      frame.addEventListener("load", () => this.start(frame.contentWindow, address), { once: true });
      const attach = () => document.body.appendChild(frame);
      document.body ? attach() : addEventListener("DOMContentLoaded", attach, { once: true });
    }
    start(inner, address) {
      // What the script posts goes to the page, and what the page posts is an event in the frame.
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...addresses) => addresses.reduce((before, one) => before.then(() => this.run(inner, one)), Promise.resolve());
      this.run(inner, address).then(() => {
        this.inner = inner;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    run(inner, address) {
      return new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        inner.document.head.appendChild(script);
      });
    }
    postMessage(data) {
      if (!this.inner) return void this.waiting.push(data);
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
    terminate() {}
  };
}
