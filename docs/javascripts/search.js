// The search takes a hyphen before a word for "without this word", so that `--disk` would
// find nothing. Two hyphens begin a flag: they are dropped on the way to the search's worker.
{
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (typeof message?.data === "string") {
      message = { ...message, data: message.data.replace(/(^|[\s"])--(?=\w)/g, "$1") };
    }
    return post.call(this, message, ...rest);
  };
}
