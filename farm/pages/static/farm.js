// Live updates of an open build, or of one of its cells. Without this script a page shows what was when it was loaded.
"use strict";
(() => {
  const FIRST_PAUSE = 1000;
  const LONGEST_PAUSE = 30000;
  const REDRAWN = 3000;
  const main = document.getElementById("main");
  let cells = new Map();
  let position, source, timer, drawing;
  let pause = FIRST_PAUSE;
  let resting = REDRAWN;

  function begin() {
    dress();
    if (!main.dataset.events || !window.EventSource) return;
    position = main.dataset.position;
    cells = new Map();
    for (const link of main.querySelectorAll("#matrix:not([data-live]) td > a")) {
      cells.set(decodeURIComponent(link.getAttribute("href").split("/cells/")[1]), link);
    }
    connect();
  }

  function connect() {
    source = new EventSource(`${main.dataset.events}?after=${encodeURIComponent(position)}`);
    source.addEventListener("open", () => {
      say(position === "reading" ? "It is shown as soon as they are read." : "Live: this page updates by itself.");
    });
    source.addEventListener("news", (event) => {
      position = event.lastEventId;
      pause = FIRST_PAUSE;
      const news = JSON.parse(event.data);
      if (!main.dataset.cell) {
        if (document.getElementById("running-now")) show(news);
        drawing ||= setTimeout(redraw, resting);
      }
      else if (Object.hasOwn(news.cells, main.dataset.cell)) {
        source.close();
        read();
      }
    });
    for (const kind of ["reset", "end"]) {
      source.addEventListener(kind, () => {
        source.close();
        read();
      });
    }
    source.addEventListener("error", () => {
      say("The connection is gone; trying again.");
      // The browser tries again by itself unless the server, or a proxy, refused.
      if (source.readyState === EventSource.CLOSED) later(connect);
    });
  }

  function later(what) {
    clearTimeout(timer);
    timer = setTimeout(what, pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }

  function show(news) {
    document.getElementById("headline").textContent = news.headline;
    for (const [identifier, [look, text]] of Object.entries(news.cells)) {
      const link = cells.get(identifier);
      if (!link) continue;
      link.textContent = text;
      link.parentElement.className = look;
    }
    for (const count of main.querySelectorAll("[data-look]")) {
      const now = news.looks[count.dataset.look] || 0;
      count.textContent = now.toLocaleString("en");
      count.closest("li").hidden = !now;
    }
    const rows = news.running.map((texts) => {
      const row = document.createElement("tr");
      texts.forEach((text, column) => {
        const place = row.insertCell();
        if (column === 0) {
          const link = place.appendChild(document.createElement("a"));
          link.href = main.dataset.events.replace(/events$/, `cells/${text}`);
          link.textContent = text;
        } else {
          place.textContent = text;
          if (column === 3) place.className = "n";
        }
      });
      return row;
    });
    document.getElementById("running-now").replaceChildren(...rows);
    dress();
  }

  async function fetched() {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(answer.statusText);
    return new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
  }

  // Show what only the server can draw as it is now; the focus stays on its link.
  async function redraw() {
    try {
      if (!main.querySelector("[data-live]")) return;
      const began = performance.now();
      const fresh = await fetched();
      resting = Math.max(REDRAWN, 8 * (performance.now() - began));
      for (const part of fresh.querySelectorAll("[data-live]")) {
        const shown = document.getElementById(part.id);
        const focused = shown?.contains(document.activeElement) && document.activeElement.getAttribute("href");
        shown?.replaceWith(part);
        dress();
        if (focused) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
      }
    } catch {
      // The next news try again.
    } finally {
      drawing = 0;
    }
  }

  // Show the page as the server has it now, at the same place.
  async function read() {
    try {
      const fresh = await fetched();
      main.replaceChildren(...fresh.childNodes);
      for (const name of ["events", "position", "cell"]) {
        if (fresh.dataset[name]) main.dataset[name] = fresh.dataset[name];
        else delete main.dataset[name];
      }
      begin();
    } catch {
      say("This page could not be read again; trying again.");
      later(read);
    }
  }

  function say(text) {
    const place = document.getElementById("connection");
    if (place) place.textContent = text;
  }

  // Titles in the cells of tables, which a phone shows in place of columns; copy buttons next to ids, keys and commands.
  function dress() {
    for (const table of main.querySelectorAll("table.list")) {
      const titles = [...table.tHead.rows[0].cells].map((each) => each.textContent.replace(/ [↑↓]$/, ""));
      table.classList.add("titled");
      for (const row of table.tBodies[0].rows) {
        for (const place of row.cells) if (place.colSpan === 1 && titles[place.cellIndex]) place.dataset.title = titles[place.cellIndex];
      }
    }
    // The newest builds are on the right.
    const across = document.getElementById("across");
    if (across) across.parentElement.scrollLeft = across.scrollWidth;
    if (!navigator.clipboard) return;
    for (const place of main.querySelectorAll(".id:not(a), code")) {
      const command = place.tagName !== "CODE" || place.closest("pre[tabindex]") || /^(farm|curl) \S+ \S/.test(place.textContent);
      if (!command || place.nextElementSibling?.className === "copy" || place.querySelector(".copy")) continue;
      const text = (place.title || place.textContent).trim();
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "copy";
      button.setAttribute("aria-label", `Copy ${text.slice(0, 60)}`);
      button.addEventListener("click", async () => {
        const done = await navigator.clipboard.writeText(text).then(() => true, () => false);
        document.getElementById("said").textContent = done ? "Copied." : "The browser refused to copy.";
        button.textContent = done ? "copied" : "not copied";
      });
      if (["DD", "TD"].includes(place.tagName)) place.append(button);
      else place.after(button);
    }
  }

  // "/" leads to the first filter, "j" and "k" to the next and the previous row's link.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (event.key === "/") {
      const field = main.querySelector("form.filters input:not([type=hidden])");
      if (field) event.preventDefault();
      field?.focus();
    } else if (event.key === "j" || event.key === "k") {
      const rows = [...main.querySelectorAll("tbody tr")].map((row) => row.querySelector("a[href]")).filter(Boolean);
      const here = rows.findIndex((link) => link.closest("tr").contains(document.activeElement));
      rows[event.key === "j" ? here + 1 : Math.max(here - 1, 0)]?.focus();
    } else if (event.key === "?") {
      document.getElementById("said").textContent = "";
      document.getElementById("keys").showModal();
    }
  });

  begin();
})();
