// The engine calls pictures by labels that tell nothing of them. What one's own look like only this page knows.

import { mine } from "./api.js";

const MOST = 64;
const own = new Map(); // by label, those that were sent last at the end

/** Learn from this page's requests which labels its pictures have. */
export function learnPictures({ requests, mine: labels }) {
  for (const [label, , , , , , , , , , pictures] of requests) {
    if (!labels.includes(label)) continue;
    const sent = [...mine.values()].findLast((each) => each.length && each.length === pictures.length) ?? [];
    sent.forEach((picture, place) => {
      own.delete(pictures[place]);
      own.set(pictures[place], picture);
    });
  }
  for (const label of [...own.keys()].slice(0, -MOST)) own.delete(label);
}

/** The picture with this label; undefined where it is another's. */
export const ownPicture = (label) => own.get(label);
