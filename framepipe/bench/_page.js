// Memory over time: one reading of one kind of work at a time. Without this every one of them is shown.
const pick = document.querySelector(".pick");
if (pick) {
  const selects = [...pick.querySelectorAll("select")];
  const choices = [...document.querySelectorAll(".choice")];
  const show = () => {
    for (const choice of choices) {
      choice.hidden = !selects.every((select) => choice.dataset[select.name] === select.value);
    }
  };
  for (const select of selects) select.addEventListener("change", show);
  pick.hidden = false;
  show();
  addEventListener("beforeprint", () => choices.forEach((choice) => (choice.hidden = false)));
  addEventListener("afterprint", show);
}
