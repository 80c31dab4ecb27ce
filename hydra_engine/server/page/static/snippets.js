// A request as a command or a program that anybody can run. Pictures are read from files of their names, and the key comes
// from the environment: neither is ever copied.

import { apiKey } from "./api.js";

const PICTURE = "\u0000picture ";

export function asCurl(body, pictures, base) {
  const json = JSON.stringify(plainBody(body), null, 1).replaceAll("'", `'\\''`);
  const text = json.replace(/\\u0000picture (\d+)/g, (_, index) => {
    const { name, type } = pictures[index];
    return `data:${type};base64,'"$(base64 -w0 ${quoted(name)})"'`;
  });
  const key = apiKey() ? ` \\\n  -H "Authorization: Bearer $HYDRA_API_KEY"` : "";
  return `printf '%s' '${text}' |\ncurl ${base}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} --data-binary @-\n`;
}

export function asPython(body, pictures, base) {
  const { model, messages, ...options } = plainBody(body);
  const lines = ["import base64", "from pathlib import Path", "", "import openai", ""];
  if (!pictures.length) lines.splice(0, 3);
  const key = apiKey() ? `os.environ["HYDRA_API_KEY"]` : `"none"`;
  if (apiKey()) lines.unshift("import os");
  if (pictures.length) {
    lines.push("", "def data_url(name: str, kind: str) -> str:",
      `    return f"data:{kind};base64,{base64.b64encode(Path(name).read_bytes()).decode()}"`, "", "");
  }
  lines.push(`client = openai.OpenAI(base_url=${JSON.stringify(`${base}/v1`)}, api_key=${key})`,
    "answer = client.chat.completions.create(", `    model=${JSON.stringify(model)},`,
    `    messages=${indent(python(messages, pictures))},`);
  for (const [name, value] of Object.entries(options)) lines.push(`    ${name}=${python(value, pictures)},`);
  return [...lines, ")", "print(answer.choices[0].message.content)", ""].join("\n");
}

/** The body without what only this page asks for, and with a mark in place of each picture. */
function plainBody(body) {
  const { stream: _stream, stream_options: _options, return_metrics: _metrics, ...rest } = body;
  let index = 0;
  return JSON.parse(JSON.stringify(rest, (key, value) => (key === "url" && value.startsWith("data:") ? `${PICTURE}${index++}` : value)));
}

const quoted = (name) => (/^[\w.][\w.-]*$/.test(name) ? name : `'./${name.replaceAll("'", "")}'`);
const indent = (text) => text.replaceAll("\n", "\n    ");

function python(value, pictures) {
  if (typeof value === "string" && value.startsWith(PICTURE)) {
    const { name, type } = pictures[Number(value.slice(PICTURE.length))];
    return `data_url(${JSON.stringify(name)}, ${JSON.stringify(type)})`;
  }
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[\n${value.map((item) => `    ${indent(python(item, pictures))},`).join("\n")}\n]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${python(item, pictures)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
