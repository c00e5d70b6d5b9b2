// The one tooltip of the page: shown for what is pointed at or has the focus.

import { $ } from "./dom.js";

const GAP = 8;
let owner = null;
let place = null; // gives the rectangle that it belongs to

/** Show `nodes` next to the rectangle of the window that `where` gives, on behalf of `element`. */
export function showTip(element, where, ...nodes) {
  owner = element;
  place = where;
  $("tip").replaceChildren(...nodes.filter(Boolean));
  $("tip").hidden = false;
  move();
}

export function hideTip(element = owner) {
  if (element !== owner) return;
  $("tip").hidden = true;
  owner = null;
}

function move() {
  const tip = $("tip"), box = place();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(box.left + box.width / 2 - width / 2, GAP), innerWidth - width - GAP);
  const above = box.top - height - GAP;
  tip.style.left = `${Math.max(left, GAP)}px`;
  tip.style.top = `${above > GAP ? above : Math.min(box.bottom + GAP, innerHeight - height - GAP)}px`;
}

function onMove() {
  if (!owner) return;
  if (owner.isConnected && owner.contains(document.activeElement)) move();
  else hideTip();
}

addEventListener("scroll", onMove, { capture: true, passive: true });
addEventListener("resize", onMove);
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
