// Draws the figures in the colours of the day: light, dark, or light for print. Names such as "@accent" become colours.
(function () {
  "use strict";
  const { figures, themes, font } = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 560;

  function painted(value, theme) {
    if (typeof value === "string") return value[0] !== "@" ? value : value === "@font" ? font : theme[value.slice(1)];
    if (Array.isArray(value)) return value.map((item) => painted(item, theme));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, theme)]));
  }

  function merged(base, change) {
    const result = { ...base };
    for (const [name, value] of Object.entries(change)) {
      const nested = value !== null && typeof value === "object" && !Array.isArray(value);
      result[name] = nested ? merged(base[name] || {}, value) : value;
    }
    return result;
  }

  // What Plotly draws of one figure, as wide as its place is now.
  function made(name, theme) {
    const figure = figures[name];
    const width = document.getElementById(name).clientWidth;
    const layout = merged(figure.layout, width < NARROW ? figure.narrow : {});
    return { data: painted(figure.data, theme), layout: { ...painted(layout, theme), width } };
  }

  function draw(theme) {
    return Promise.all(
      Object.keys(figures).map((name) => {
        const place = document.getElementById(name);
        const { data, layout } = made(name, theme);
        place.style.height = `${layout.height}px`;
        return Plotly.react(place, data, layout, { displayModeBar: false, showTips: false, doubleClick: false });
      })
    );
  }

  // An image stands alone: on white, under its title, with a legend of whatever has a name.
  function save(name, format) {
    const { data, layout } = made(name, themes.light);
    const named = data.filter((trace) => trace.name).length;
    const title = document.getElementById(name).closest("figure").querySelector("h3").textContent;
    const room = 40 + 22 * Math.ceil((named * 170) / layout.width);
    Object.assign(layout, {
      paper_bgcolor: themes.light.paper,
      height: layout.height + room,
      margin: { ...layout.margin, t: layout.margin.t + room },
      title: { text: title, font: { size: 15, color: themes.light.ink }, x: 0.02, xanchor: "left", y: 1, yref: "container",
               yanchor: "top", pad: { t: 14 } },
      showlegend: named > 0,
      legend: { orientation: "h", traceorder: "normal", x: 0.01, xref: "container", yref: "container", yanchor: "top" },
    });
    layout.legend.y = 1 - 36 / layout.height;
    const shown = data.map((trace) => ({ ...trace, showlegend: Boolean(trace.name) }));
    const size = { width: layout.width, height: layout.height, scale: format === "png" ? 2 : 1 };
    return Plotly.downloadImage({ data: shown, layout }, { ...size, format, filename: name });
  }

  const now = () => (dark.matches ? themes.dark : themes.light);
  let waiting = 0;
  let last = window.innerWidth;
  dark.addEventListener("change", () => draw(now()));
  window.addEventListener("resize", () => {
    if (window.innerWidth === last) return;
    last = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => draw(now()));
  });
  document.addEventListener("click", (event) => {
    const { chart, format } = event.target.dataset;
    if (chart) save(chart, format);
  });
  // Paper is light, and narrower than most screens: the style sheet's "paper" has its width.
  window.addEventListener("beforeprint", () => {
    document.documentElement.classList.add("paper");
    draw(themes.light);
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    draw(now());
  });
  draw(now()).then(() => document.documentElement.setAttribute("data-drawn", "yes"));
})();
