// Reads every kind of answer with openai for Node and prints what it understood, as JSON.
import OpenAI from "openai";

const [baseURL, tool, flatTool] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const chat = { model: "tiny", messages: [{ role: "user", content: "x" }], tools: [JSON.parse(tool)] };
const response = { model: "tiny", input: "x", tools: [JSON.parse(flatTool)] };
const completion = { model: "tiny", prompt: "x", max_tokens: 1000 };
const said = {};

said.whole = (await client.chat.completions.create(chat)).choices[0];

// Put together by hand: the client's own helper does not know of thoughts.
const message = { content: "", reasoning_content: "", tool_calls: [] };
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...chat, ...options })) {
  said.usage = chunk.usage?.completion_tokens;
  for (const choice of chunk.choices) {
    message.content += choice.delta.content ?? "";
    message.reasoning_content += choice.delta.reasoning_content ?? "";
    for (const part of choice.delta.tool_calls ?? []) {
      message.tool_calls[part.index] ??= { id: part.id, function: { name: "", arguments: "" } };
      message.tool_calls[part.index].function.name += part.function?.name ?? "";
      message.tool_calls[part.index].function.arguments += part.function?.arguments ?? "";
    }
    said.stream = { message, finish_reason: choice.finish_reason };
  }
}

const understood = (answer) => {
  const { name, arguments: given } = answer.output.find((item) => item.type === "function_call");
  return { text: answer.output_text, call: { name, arguments: given } };
};
said.response = understood(await client.responses.create(response));
said.response_stream = understood(await client.responses.stream(response).finalResponse());

said.completion = (await client.completions.create(completion)).choices[0].text;
said.completion_stream = "";
for await (const chunk of await client.completions.create({ ...completion, stream: true })) {
  said.completion_stream += chunk.choices[0]?.text ?? "";
}

said.models = [];
for await (const model of client.models.list()) said.models.push(model.id);

try {
  await client.chat.completions.create({ ...chat, temperature: 3 });
} catch (error) {
  said.error = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(JSON.stringify(said));
