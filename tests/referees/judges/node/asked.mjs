// What the judges of this folder ask: addresses, the model, tools, and a conversation's length.
import { z } from "zod";

export const url = process.env.BRIDLE_REFEREES_URL;
export const model = "gpt-5-claude-4-gemini-3";
export const question = "What is two and two?";
export const answer = "The answer is four.";
export const TURNS = 6;
export const City = z.object({ name: z.string(), people: z.number() });
export const oslo = { name: "Oslo", people: 700000 };
export const exactly = `Say exactly: ${JSON.stringify(oslo)}`;
export const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
