// Reads documents of KEDA as a JSON list, and prints a line for each that its definitions refuse.
const models = require("@kubernetes-models/keda/keda.sh/v1alpha1");
let text = "";
process.stdin.on("data", (part) => (text += part));
process.stdin.on("end", () => {
  for (const document of JSON.parse(text)) {
    try {
      new models[document.kind](document).validate();
    } catch (error) {
      console.log(document.kind, document.metadata.name, error.message);
    }
  }
});
