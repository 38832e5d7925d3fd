// Before the first paint: the theme that was chosen here last; without one, the system's.
const chosen = localStorage.getItem("parallm-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
