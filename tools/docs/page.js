(function () {
  var box = document.getElementById("search"), results = document.getElementById("results");
  var menu = document.getElementById("menu"), contents = document.getElementById("contents");
  var chosen = -1;

  /* A name's text is that of its own row, or of the declaration around its heading. */
  var entries = Array.prototype.map.call(document.querySelectorAll("[data-name]"), function (at) {
    var whole = at.tagName === "H3" ? at.parentNode : at;
    var anchor = at.id || (at.querySelector("[id]") || {}).id;
    return { name: at.dataset.name, lower: at.dataset.name.toLowerCase(), kind: at.dataset.kind, anchor: anchor, text: whole.textContent.replace(/\s+/g, " ") };
  });
  entries.forEach(function (e) { e.all = e.text.toLowerCase(); });

  /* Names before comments, and of names those that begin with the word. */
  function rank(e, words) {
    var sum = 0;
    for (var i = 0; i < words.length; i++) {
      var w = words[i], at = e.lower.indexOf(w);
      if (e.lower === w || e.lower === "te_" + w) sum += 1000;
      else if (at === 0 || e.lower.indexOf("te_" + w) === 0) sum += 400 - e.lower.length;
      else if (at > 0) sum += 200 - e.lower.length;
      else if (e.all.indexOf(w) >= 0) sum += 1;
      else return 0;
    }
    return Math.max(sum, 1);
  }
  function piece(e, word) {
    var at = Math.max(0, e.all.indexOf(word, e.name.length) - 60);
    return (at ? "... " : "") + e.text.substr(at, 170);
  }
  function show() {
    var words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    results.textContent = "";
    chosen = -1;
    results.hidden = !words.length;
    if (!words.length) return;
    var found = entries.map(function (e) { return { e: e, rank: rank(e, words) }; }).filter(function (f) { return f.rank; });
    found.sort(function (a, b) { return b.rank - a.rank; });
    found.slice(0, 40).forEach(function (f) {
      var a = document.createElement("a"), b = document.createElement("b"), small = document.createElement("small");
      a.href = "#" + f.e.anchor;
      b.textContent = f.e.name;
      small.textContent = " " + f.e.kind + " ";
      a.append(b, small, document.createElement("br"), piece(f.e, words[words.length - 1]));
      results.append(a);
    });
    if (!found.length) results.append(Object.assign(document.createElement("p"), { textContent: "Nothing has all of these words." }));
  }
  function choose(step) {
    var all = results.querySelectorAll("a");
    if (!all.length) return;
    if (all[chosen]) all[chosen].classList.remove("chosen");
    chosen = (chosen + step + all.length) % all.length;
    all[chosen].classList.add("chosen");
    all[chosen].scrollIntoView({ block: "nearest" });
  }
  box.addEventListener("input", show);
  box.addEventListener("focus", show);
  box.addEventListener("keydown", function (event) {
    if (event.key === "ArrowDown") choose(1);
    else if (event.key === "ArrowUp") choose(-1);
    else if (event.key === "Enter") (results.querySelector("a.chosen") || results.querySelector("a") || { click: function () {} }).click();
    else if (event.key === "Escape") box.value = "", show();
    else return;
    event.preventDefault();
  });
  results.addEventListener("click", function (event) { if (event.target.closest("a")) results.hidden = true, box.blur(); });
  document.addEventListener("click", function (event) { if (!event.target.closest("#results, header")) results.hidden = true; });
  document.addEventListener("keydown", function (event) { if (event.key === "/" && document.activeElement !== box) event.preventDefault(), box.focus(); });
  menu.addEventListener("click", function () { menu.setAttribute("aria-expanded", contents.classList.toggle("open")); });
  contents.addEventListener("click", function (event) { if (event.target.closest("a")) contents.classList.remove("open"); });
})();
