"""From a model's own way of writing thoughts, content and tool calls to events, while the text grows."""
