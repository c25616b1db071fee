"use strict";
// Replaces the board by the one that the server has drawn after each poll. All pages work without this script, too.
(() => {
  const silence = document.getElementById("silence");
  const filter = document.getElementById("q");
  const freeze = document.getElementById("freeze");
  let source = null;
  let latest = null;

  const frozen = () => freeze.getAttribute("aria-pressed") === "true";
  const time = () => new Date().toTimeString().slice(0, 8);

  const show = () => {
    // Not while the user marks text to copy it.
    const selection = document.getSelection();
    const board = document.getElementById("board");
    if (latest === null || frozen() || (selection && !selection.isCollapsed && board.contains(selection.anchorNode))) return;
    const fresh = new DOMParser().parseFromString(latest, "text/html").getElementById("board");
    latest = null;
    if (!fresh) return;
    const active = board.contains(document.activeElement) ? document.activeElement : null;
    const before = board.querySelector(".scroll");
    const left = before ? before.scrollLeft : 0;
    board.replaceWith(document.adoptNode(fresh));
    const scroll = fresh.querySelector(".scroll");
    if (scroll) scroll.scrollLeft = left;
    if (active) {
      const again = active.id ? document.getElementById(active.id) : scroll;
      if (again) again.focus({ preventScroll: true });
    }
  };

  const listen = () => {
    if (source) source.close();
    source = new EventSource("/events" + location.search);
    source.addEventListener("board", (event) => {
      silence.textContent = "";
      latest = event.data;
      show();
    });
    source.addEventListener("error", () => {
      if (!silence.textContent) {
        silence.textContent = `The dashboard has not answered since ${time()}; trying again.`;
      }
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    });
  };

  let typing = null;
  filter.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const query = new URLSearchParams(location.search);
      query.set("q", filter.value);
      history.replaceState(null, "", "?" + query);
      document.querySelectorAll("nav a").forEach((link) => {
        const url = new URL(link.href);
        url.searchParams.set("q", filter.value);
        link.href = url.pathname + url.search;
      });
      listen();
    }, 250);
  });

  freeze.addEventListener("click", () => {
    freeze.setAttribute("aria-pressed", String(!frozen()));
    show();
  });

  const step = (by) => {
    const rows = [...document.querySelectorAll("#board a.row")];
    if (!rows.length) return;
    const at = rows.indexOf(document.activeElement);
    rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + by))].focus();
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target instanceof HTMLInputElement) {
      if (event.key === "Escape" && event.target === filter) filter.blur();
      return;
    }
    const view = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (view) view.click();
    else if (event.key === "/") filter.focus();
    else if (event.key === "f") freeze.click();
    else if (event.key === "ArrowDown" || event.key === "j") step(1);
    else if (event.key === "ArrowUp" || event.key === "k") step(-1);
    else return;
    event.preventDefault();
  });

  freeze.hidden = false;
  document.getElementById("keys").hidden = false;
  listen();
})();
