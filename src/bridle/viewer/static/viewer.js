// The token strip, the charts, the keyboard, and the clock of live parts. Everything else is HTML and htmx.

const LIVE_MS = 2000;

/** What a token's shade may show: a number of the token, and the bounds of the four shades. */
const SHADES = {
  probability: {
    name: "probability",
    legend: "The darker a token, the less probable it was.",
    level: ([, , logprob]) => -logprob,
    bounds: [0.1, 0.7, 2.3, 4.6],
  },
  gap: {
    name: "engine − trainer",
    legend: "The darker a token, the more the logprobs of engine and trainer differ.",
    level: ([, , logprob, , , trainer]) => (trainer === null ? 0 : Math.abs(logprob - trainer)),
    bounds: [0.001, 0.01, 0.05, 0.2],
  },
  entropy: {
    name: "entropy",
    legend: "The darker a token, the less certain the policy was.",
    level: ([, , , , , , entropy]) => entropy ?? 0,
    bounds: [0.1, 0.5, 1, 2],
  },
};

/** Shows tokens; the mouse, a click and arrow keys choose one, which a line below describes. */
class TokenStrip extends HTMLElement {
  connectedCallback() {
    const data = JSON.parse(this.querySelector("script").textContent);
    this.replaceChildren(...data.strips.map((strip) => this.strip(strip)));
  }

  strip({ name, start, tokens, scored }) {
    const box = document.createElement("div");
    box.className = "strip";
    const title = document.createElement("h4");
    title.textContent = `${name}: ${tokens.length} tokens from position ${start}`;
    const run = document.createElement("div");
    run.className = "run";
    run.tabIndex = 0;
    run.setAttribute("role", "group");
    run.setAttribute("aria-label", `${title.textContent}. Arrow keys move through them.`);
    const about = document.createElement("div");
    about.className = "about";
    about.setAttribute("aria-live", "polite");
    const cells = tokens.map((token, index) => {
      const cell = document.createElement("span");
      cell.className = shade(token, "probability");
      cell.textContent = token[1].replaceAll("\n", "⏎\n") || "∅";
      cell.dataset.index = index;
      return cell;
    });
    run.append(...cells);
    let at = -1;
    const choose = (index) => {
      if (index < 0 || index >= cells.length) return;
      cells[at]?.classList.remove("chosen", "pinned");
      at = index;
      cells[at].classList.add("chosen");
      about.textContent = describe(tokens[at], start + at, scored);
    };
    let pinned = false; // by a click, until the next one on the same token
    run.addEventListener("mouseover", ({ target: { dataset } }) => {
      if (dataset.index !== undefined && !pinned) choose(Number(dataset.index));
    });
    run.addEventListener("click", ({ target: { dataset } }) => {
      if (dataset.index === undefined) return;
      const index = Number(dataset.index);
      pinned = !(pinned && index === at);
      choose(index);
      cells[at].classList.toggle("pinned", pinned);
    });
    run.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(cells.length - 1, at + step)));
      cells[at].scrollIntoView({ block: "nearest" });
    });
    const explain = (by) => {
      about.textContent = `A click holds a token. ${SHADES[by].legend} An underlined one is not trainable.`;
    };
    explain("probability");
    box.append(title, ...(scored ? [this.shades(tokens, cells, explain)] : []), run, about);
    return box;
  }

  /** Chooses what the shade of the tokens shows. */
  shades(tokens, cells, explain) {
    const label = document.createElement("label");
    const choice = document.createElement("select");
    choice.append(...Object.entries(SHADES).map(([by, { name }]) => new Option(name, by)));
    choice.addEventListener("change", () => {
      cells.forEach((cell, index) => {
        const held = ["chosen", "pinned"].filter((name) => cell.classList.contains(name));
        cell.className = [shade(tokens[index], choice.value), ...held].join(" ");
      });
      explain(choice.value);
    });
    label.className = "shades";
    label.append("Shade by ", choice);
    return label;
  }
}
customElements.define("token-strip", TokenStrip);

function shade(token, by) {
  const [id, text, logprob, , reason] = token;
  const form = text === String(id) ? " id" : "";
  if (logprob === null) return `tk observed${form}`;
  const { level, bounds } = SHADES[by];
  const value = level(token);
  return `tk s${bounds.filter((bound) => value > bound).length}${reason ? " masked" : ""}${form}`;
}

function describe([id, text, logprob, version, reason, trainer, entropy], position, scored) {
  const parts = [`position ${position}`, `id ${id}`];
  if (text !== String(id)) parts.push(JSON.stringify(text));
  if (logprob === null) return [...parts, "observed"].join(" · ");
  parts.push(`logprob ${logprob.toFixed(4)}`, `probability ${(100 * Math.exp(logprob)).toFixed(2)} %`, `version ${version}`);
  if (trainer !== null) {
    parts.push(`trainer’s logprob ${trainer.toFixed(4)} at version ${scored.version}`, `engine − trainer ${(logprob - trainer).toFixed(4)}`);
    parts.push(`entropy ${entropy.toFixed(3)} nats`, `trained in step ${scored.step} of ${scored.run}`);
  } else if (reason) parts.push(`not trainable: ${reason.replaceAll("_", " ")}`);
  else parts.push(scored ? `not trained in step ${scored.step} of ${scored.run}` : "trainable");
  return parts.join(" · ");
}

const LINES = ["--accent", "--rust", "--violet", "--good", "--warn", "--bad", "--dim", "--ink"];

/** Draws values over steps with uPlot; the caption shows those under the mouse, or the last. */
class LineChart extends HTMLElement {
  connectedCallback() {
    const { steps, series, styles } = JSON.parse(this.querySelector("script").textContent);
    const caption = this.closest("figure").querySelector("b");
    const last = caption.textContent;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name);
    const axis = { stroke: colour("--dim"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const line = (name, index) => ({
      label: name,
      stroke: colour(LINES[styles[index][0] % LINES.length]),
      dash: styles[index][1] ? [4, 2] : [],
      width: 1.5,
      spanGaps: true,
      points: { show: steps.length < 60, size: 4 },
    });
    const size = () => ({ width: this.clientWidth, height: this.clientHeight });
    const zero = (_, low, high) => (low < 0 || high > 0 ? [Math.min(0, low), Math.max(0, high) * 1.05] : [0, 1]);
    const plot = new uPlot(
      {
        ...size(),
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false } },
        scales: { x: { time: false }, y: { range: zero } },
        axes: [
          { ...axis, size: 22, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
          { ...axis, size: 48, space: 28, values: (_, ticks) => ticks.map(figure) },
        ],
        series: [{}, ...Object.keys(series).map(line)],
        hooks: {
          setCursor: [({ cursor: { idx, left }, data }) => {
            const shown = left < 0 || idx === null ? null : data.slice(1).map((of) => figure(of[idx])).join(" · ");
            caption.textContent = shown === null ? last : `step ${steps[idx]}: ${shown}`;
          }],
        },
      },
      [steps, ...Object.values(series)],
      this,
    );
    new ResizeObserver(() => plot.setSize(size())).observe(this);
  }
}
customElements.define("line-chart", LineChart);

function figure(value) {
  return value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
}

// -- live parts: asked for again while the page is seen and nobody types in them ------------------

setInterval(() => {
  if (document.hidden) return;
  for (const part of document.querySelectorAll("[data-live]")) {
    if (!part.contains(document.activeElement)) part.dispatchEvent(new CustomEvent("refresh"));
  }
}, LIVE_MS);

// -- a link to a turn that has not come yet: what lies before it is asked for --------------------

const PART = 500; // turns that one answer may have

async function reach() {
  const wanted = Number(location.hash.match(/^#turn-(\d+)$/)?.[1]);
  for (let before = 0; wanted; ) {
    const turn = document.getElementById(`turn-${wanted}`);
    if (turn) return turn.scrollIntoView();
    const more = document.querySelector(".coming a");
    const address = more && new URL(more.href);
    const first = Number(address?.searchParams.get("first") ?? 0);
    if (first <= before) return; // there is no such turn
    before = first;
    address.searchParams.set("count", Math.min(PART, Math.max(1, wanted - first + 1)));
    await htmx.ajax("GET", address.pathname + address.search, { target: ".coming", swap: "outerHTML" });
  }
}
addEventListener("hashchange", reach);
reach();

// -- keyboard --------------------------------------------------------------------------------------

const lines = () => [...document.querySelectorAll("[data-line]")];
let current = null;

function move(step) {
  const all = lines();
  const index = all.findIndex((line) => line === current || (current?.id && line.id === current.id));
  const next = all[Math.max(0, Math.min(all.length - 1, index < 0 ? 0 : index + step))];
  if (!next) return;
  current?.classList.remove("at");
  document.querySelectorAll(".at").forEach((line) => line.classList.remove("at"));
  current = next;
  current.classList.add("at");
  current.scrollIntoView({ block: "nearest" });
  const link = current.querySelector("a");
  (current.matches("[tabindex]") ? current : link)?.focus({ preventScroll: true });
}

const places = { s: "Sessions", g: "Groups", r: "Runs", a: "Audit" };
let going = false;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (going) {
    going = false;
    [...document.querySelectorAll(".top nav a")].find((a) => a.textContent === places[event.key])?.click();
    return;
  }
  const act = {
    j: () => move(1),
    k: () => move(-1),
    g: () => (going = true),
    t: () => current?.querySelector("[data-tokens]")?.click(),
    "/": () => document.querySelector("#filters input")?.focus(),
    "?": () => document.querySelector("#keys").showModal(),
    Enter: () => event.target === current && current?.querySelector("a")?.click(),
  }[event.key];
  if (!act) return;
  if (event.key === "/") event.preventDefault();
  act();
});
document.querySelector("#help").addEventListener("click", () => document.querySelector("#keys").showModal());
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.submit();
});
