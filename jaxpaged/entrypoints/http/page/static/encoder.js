// The encoder cache: embeddings of pictures, those that requests still read and those that are kept.

import { colorOf } from "./colors.js";
import { $, counted, make, percent, whole } from "./dom.js";
import { ownPicture } from "./own_pictures.js";
import { drawing } from "./pictures.js";

const PARTS = [["held", "in use"], ["kept", "kept"], ["free", "free"]];

/** Show the cache of an engine that sees; `encoder` is null where it sees nothing. */
export function showEncoder({ encoder }) {
  $("encoder").hidden = $("encode-key").hidden = !encoder;
  if (!encoder) return;
  const { pages, held, kept, pictures, queries, hits, shown } = encoder;
  const counts = { held, kept, free: pages - held - kept };
  $("encoder-caption").textContent = [
    `${percent(held / pages)} of ${counted(pages, "page")} in use`,
    counted(pictures, "picture"),
    queries > 0 && `${percent(hits / queries)} of ${whole(queries)} found here`,
  ].filter(Boolean).join(" · ");
  const pieces = PARTS.filter(([name]) => counts[name] > 0).map(([name]) => {
    const piece = make("i", { class: `page-${name}` });
    piece.style.flexGrow = counts[name] / pages;
    return piece;
  });
  $("encoder-bar").replaceChildren(...pieces);
  $("encoder-legend").replaceChildren(...PARTS.map(([name, words]) => make("li", {}, make("i", { class: `key page-${name}` }), `${words} `, make("b", {}, whole(counts[name])))));
  const items = shown.map(pictureItem);
  if (pictures > shown.length) items.push(make("li", { class: "quiet" }, `and ${whole(pictures - shown.length)} more`));
  $("encoder-pictures").replaceChildren(...items);
}

/** One picture of the cache: its own look if this page sent it, or else a field in its label's colour. */
function pictureItem([label, pages, isHeld]) {
  const picture = ownPicture(label), state = isHeld ? "in use" : "kept";
  const other = make("i", { class: "other" });
  other.style.background = colorOf(label);
  return make("li", { class: `page-${isHeld ? "held" : "kept"}` }, picture ? drawing(picture) : other, make("span", {}, `${picture?.name ?? label}: ${counted(pages, "page")}, ${state}`));
}
