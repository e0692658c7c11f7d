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

  function draw(theme) {
    return Promise.all(
      Object.entries(figures).map(([name, figure]) => {
        const place = document.getElementById(name);
        const width = place.clientWidth;
        const layout = merged(figure.layout, width < NARROW ? figure.narrow : {});
        place.style.height = `${layout.height}px`;
        const options = { displayModeBar: false, showTips: false, doubleClick: false };
        return Plotly.react(place, painted(figure.data, theme), { ...painted(layout, theme), width }, options);
      })
    );
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
