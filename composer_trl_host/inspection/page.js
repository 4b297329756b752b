(() => {
  "use strict";
  const find = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Going from site to site. Links hold the order; a filtered link is hidden and passed over.
  const links = [...document.querySelectorAll(".list a")];
  const shown = () => links.filter((link) => !link.parentElement.hidden);
  const siteOf = (link) => find(link.hash.slice(1));
  const linkOf = (site) => links.find((link) => link.hash === "#" + site.id);
  let current = null;

  const mark = (link) => {
    if (current) current.removeAttribute("aria-current");
    current = link;
    if (link) link.setAttribute("aria-current", "true");
    tell();
  };
  const tell = () => {
    const here = shown();
    const place = here.indexOf(current);
    const noun = links.length === 1 ? " site" : " sites";
    const all = here.length === links.length ? "" : ` of ${links.length}`;
    find("position").textContent = place < 0 ? here.length + all + noun : `Site ${place + 1} of ${here.length}`;
    find("previous").disabled = place <= 0;
    find("next").disabled = here.length === 0 || place === here.length - 1;
  };
  const go = (link) => {
    const site = siteOf(link);
    for (let up = site.parentElement; up; up = up.parentElement) if (up.localName === "details") up.open = true;
    mark(link);
    link.scrollIntoView({ block: "nearest" });
    site.focus({ preventScroll: true });
    site.scrollIntoView({ block: "start" });
  };
  const move = (step) => {
    const here = shown();
    const place = here.indexOf(current);
    const target = place < 0 ? (step > 0 ? here[0] : undefined) : here[place + step];
    if (target) go(target);
  };
  find("next").addEventListener("click", () => move(1));
  find("previous").addEventListener("click", () => move(-1));
  find("conversations").addEventListener("focusin", (event) => {
    const site = event.target.closest(".site");
    if (site) mark(linkOf(site));
  });
  document.querySelector(".list").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(link);
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("select, input")) return;
    if (event.key === "n" || event.key === "j") move(1);
    else if (event.key === "p" || event.key === "k") move(-1);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });

  const filter = () => {
    const kind = find("kind").value;
    const outcome = find("outcome").value;
    for (const link of links) {
      const { kinds, outcome: own } = link.parentElement.dataset;
      const fits = (!kind || kinds.split(" ").includes(kind)) && (!outcome || own === outcome);
      link.parentElement.hidden = !fits;
    }
    for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector("li:not([hidden])");
    for (const conversation of document.querySelectorAll(".conversation")) conversation.hidden = true;
    for (const link of shown()) siteOf(link).closest(".conversation").hidden = false;
    if (current && current.parentElement.hidden) mark(null);
    tell();
  };
  find("kind").addEventListener("change", filter);
  find("outcome").addEventListener("change", filter);
  filter();

  const themes = ["system", "light", "dark"];
  find("theme").addEventListener("click", (event) => {
    const root = document.documentElement;
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    event.currentTarget.textContent = "Theme: " + next;
  });

  // What both sides would have said, beside a token. The data of a site is read when it is first asked for.
  const peek = find("peek");
  const read = new Map();
  let here = null;
  let waiting = 0;

  const dataOf = (tokens) => {
    const number = tokens.id.slice("tokens-".length);
    if (!read.has(number)) {
      const island = find("data-" + number);
      read.set(number, island ? JSON.parse(island.textContent) : null);
    }
    return read.get(number);
  };
  const percent = (share) => (share < 0.001 ? "<0.1 %" : (100 * share).toFixed(1) + " %");
  const pairs = (flat) => flat.filter((_, i) => i % 2 === 0).map((label, i) => [label, flat[2 * i + 1]]);
  const named = (data, label) => data.labels[label] || "part of the next character";

  const show = (token, aloud) => {
    clearTimeout(waiting);
    const tokens = token.closest(".tokens");
    const data = dataOf(tokens);
    if (!data) return;
    const [own, student, teacher, ...sides] = data.tokens[[...tokens.querySelectorAll(".t")].indexOf(token)];
    const head = make("p");
    head.append(make("code", "", named(data, own)), make("span", "", token.dataset.d + " nats"));
    const table = make("table");
    const titles = table.createTHead().insertRow();
    for (const title of ["student", "teacher"]) {
      const cell = make("th", "", title);
      cell.scope = "col";
      titles.append(cell);
    }
    const body = table.createTBody();
    const lists = sides.map(pairs);
    for (let i = 0; i < lists[0].length; i += 1) {
      const row = body.insertRow();
      for (const list of lists) {
        const [label, share] = list[i];
        const line = make("div", label === own ? "share own" : "share");
        line.append(make("span", "", named(data, label)), make("b", "", percent(share)));
        const size = make("div", "size");
        size.style.width = 100 * share + "%";
        row.insertCell().append(line, size);
      }
    }
    const foot = table.createTFoot().insertRow();
    for (const share of [student, teacher]) foot.insertCell().textContent = "this token " + percent(share);
    peek.replaceChildren(head, table);
    if (here) here.classList.remove("here");
    here = token;
    here.classList.add("here");
    peek.hidden = false;
    place(token);
    if (aloud) {
      const words = lists.map((list) => list.map(([label, share]) => `${named(data, label)} ${percent(share)}`).join(", "));
      find("say").textContent = `${named(data, own)}, ${token.dataset.d} nats. Student: ${words[0]}. Teacher: ${words[1]}.`;
    }
  };
  const place = (token) => {
    const box = token.getClientRects()[0];
    const { offsetWidth: width, offsetHeight: height } = peek;
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
    const below = box.bottom + 6;
    const top = below + height > innerHeight && box.top - height - 6 > 0 ? box.top - height - 6 : below;
    peek.style.left = left + scrollX + "px";
    peek.style.top = top + scrollY + "px";
  };
  const hide = () => {
    clearTimeout(waiting);
    peek.hidden = true;
    if (here) here.classList.remove("here");
    here = null;
  };
  const later = () => {
    clearTimeout(waiting);
    // Long enough for the pointer to reach the box, whose text can then be selected.
    waiting = setTimeout(() => {
      const focused = document.activeElement.closest(".t");
      if (focused) show(focused, false);
      else hide();
    }, 150);
  };
  const main = find("conversations");
  const tokenOf = (event) => event.target.closest(".tokens .t");
  main.addEventListener("pointerover", (event) => {
    const token = tokenOf(event);
    if (token && event.pointerType !== "touch") show(token, false);
  });
  main.addEventListener("pointerout", (event) => tokenOf(event) && later());
  peek.addEventListener("pointerover", () => clearTimeout(waiting));
  peek.addEventListener("pointerleave", later);
  main.addEventListener("focusin", (event) => {
    const token = tokenOf(event);
    if (token) show(token, true);
    else hide();
  });
  main.addEventListener("focusout", (event) => tokenOf(event) && later());

  // One token of a site is reached by the Tab key, the others from there.
  const reach = (token) => {
    for (const other of token.closest(".tokens").querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    const fold = token.closest(".fold");
    if (fold) fold.open = true;
    token.tabIndex = 0;
    token.focus();
  };
  for (const tokens of document.querySelectorAll(".tokens")) {
    const first = tokens.querySelector(".t[data-d]");
    if (first) first.tabIndex = 0;
  }
  main.addEventListener("click", (event) => {
    const token = tokenOf(event);
    if (token && token.dataset.d && getSelection().isCollapsed) reach(token);
  });
  main.addEventListener("keydown", (event) => {
    const token = tokenOf(event);
    if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...token.closest(".tokens").querySelectorAll(".t")];
    const place = all.indexOf(token);
    const target = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: all.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    if (all[target]) reach(all[target]);
  });
})();
