// Tokens of an answer that is shown already: asked for once somebody wants to see them.

import { ApiError, ask } from "./api.js";
import { pieceText } from "./tokens.js";

const MOST_READ_AGAIN = 8000; // tokens

/** An answer's tokens as the vocabulary cuts its text; null where these are not all that the model wrote. */
export async function piecesOf({ model }, text, ids) {
  const body = { model, prompt: text, add_special_tokens: false, return_token_strs: true };
  const { tokens, token_strs: pieces } = await ask("tokenize", { method: "POST", body });
  const isAll = tokens.every((id, place) => id === ids[place]) && ids.length <= tokens.length + 1; // the token that ends it
  const texts = pieceText(pieces, text);
  return isAll && texts.join("") === text ? texts.map((piece, place) => ({ text: piece, id: tokens[place] })) : null;
}

/** An answer's tokens, and how likely each was: the model reads the prompt and the answer once more. Of a context that is
 * full it cannot read the last token. */
export async function readAgain({ model, alternatives, maxLength, hasPictures }, prompt, ids) {
  if (hasPictures) throw new ApiError(0, "A conversation with pictures cannot be read again for its probabilities. The next answer brings its own.");
  if (prompt.length + ids.length > MOST_READ_AGAIN) {
    throw new ApiError(0, "This conversation is too long to be read again for its probabilities. The next answer brings its own.");
  }
  const read = ids.slice(0, maxLength - 1 - prompt.length), unread = ids.slice(read.length);
  const body = { model, prompt: [...prompt, ...read], echo: true, max_tokens: 0, logprobs: alternatives };
  const { choices: [choice] } = await ask("v1/completions", { method: "POST", body });
  const tokens = tokensOf(choice.logprobs).slice(prompt.length);
  if (unread.length) tokens.push({ text: (await ask("detokenize", { method: "POST", body: { model, tokens: unread } })).prompt });
  return tokens.map((token, place) => ({ ...token, id: ids[place] }));
}

/** Tokens with their probabilities, in the shape of either API. */
export function tokensOf(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token, logprob: each.logprob, top: each.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
    }));
  }
  return logprobs.tokens.map((text, place) => ({
    text,
    logprob: logprobs.token_logprobs[place] ?? undefined,
    top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}
