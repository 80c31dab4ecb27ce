// Runs before the page is drawn, so that a chosen theme does not flash. Everything else is a module.
try {
  const theme = localStorage.getItem("hydra.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the system's theme it is */ }
