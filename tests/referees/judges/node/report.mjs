// A reporter of `node --test`: each test's name and the text of its failure, one JSON line each.
export default async function* report(events) {
  for await (const { type, data } of events) {
    if (type !== "test:pass" && type !== "test:fail") continue;
    if (data.details?.type === "suite") continue;
    const error = data.details?.error;
    const cause = error?.cause ?? error;
    const said = type === "test:pass" ? "" : `${cause?.name ?? "Error"}: ${cause?.message ?? cause}`;
    yield `${JSON.stringify([data.name, said])}\n`;
  }
}
