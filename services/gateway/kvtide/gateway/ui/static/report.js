// Shows a report that the Plan page hands over. Runs in a sandbox without an origin: it can read
// nothing of the gateway, and what comes as part of a report is never run.
addEventListener("message", (event) => {
  if (event.source !== parent || typeof event.data !== "string") return;
  const page = new DOMParser().parseFromString(event.data, "text/html");
  for (const each of page.querySelectorAll("script, iframe, object, embed, base, meta[http-equiv]")) each.remove();
  document.replaceChild(document.adoptNode(page.documentElement), document.documentElement);
});
parent.postMessage("ready", "*");
