// A form that is longer than its place: the names of its sections, which lead there, and a sign that more lies below.

import { make } from "./dom.js";

const NEAR = 24; // pixels

/** Buttons, one for each of the `fieldsets`. They stay in sight, and tell which section one is in. */
export function sections(form, fieldsets) {
  let wanted = null;
  const buttons = fieldsets.map((fieldset) => {
    const button = make("button", { type: "button", class: fieldset.classList.contains("only-chat") ? "plain only-chat" : "plain" }, nameOf(fieldset));
    button.addEventListener("click", () => {
      wanted = fieldset;
      form.scrollTo({ top: fieldset.offsetTop - list.offsetHeight });
      fieldset.tabIndex = -1;
      fieldset.focus({ preventScroll: true });
      mark();
    });
    return button;
  });
  const list = make("nav", { class: "sections", "aria-label": "Sections of the settings" }, ...buttons);
  const isInSight = (fieldset) => fieldset.offsetTop >= form.scrollTop && fieldset.offsetTop < form.scrollTop + form.clientHeight - NEAR;
  function mark() {
    const passed = fieldsets.findLast((each) => each.offsetHeight > 0 && each.offsetTop <= form.scrollTop + list.offsetHeight + NEAR);
    const current = wanted && isInSight(wanted) ? wanted : passed;
    fieldsets.forEach((each, place) => buttons[place].setAttribute("aria-current", each === current));
  }
  onLayout(form, mark);
  return list;
}

/** What is seen at the lower edge until one has scrolled to the end. */
export function more(form) {
  const sign = make("p", { class: "more", "aria-hidden": "true" }, make("span", {}, "More below ↓"));
  onLayout(form, () => sign.classList.toggle("off", isScrolledDown(form)));
  return sign;
}

const nameOf = (fieldset) => fieldset.querySelector("legend").textContent.split(" ")[0];
const isScrolledDown = (form) => form.scrollHeight - form.scrollTop - form.clientHeight < NEAR;

function onLayout(form, listener) {
  form.addEventListener("scroll", listener, { passive: true });
  form.addEventListener("input", listener);
  new ResizeObserver(listener).observe(form);
}
