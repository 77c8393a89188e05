//! Items of an evaluation: built in, or of a file.

use crate::error::CliError;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A prompt, and what its continuation must contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) id: String,
    pub(super) category: String,
    pub(super) prompt: String,
    pub(super) expected: String,
    pub(super) max_tokens: usize,
}

/// The six items that are part of the program.
pub(super) fn built_in() -> Vec<Item> {
    let item = |(id, category, prompt, expected, max_tokens): (&str, &str, &str, &str, usize)| Item {
        id: id.to_owned(),
        category: category.to_owned(),
        prompt: prompt.to_owned(),
        expected: expected.to_owned(),
        max_tokens,
    };
    BUILT_IN.into_iter().map(item).collect()
}

/// The items of a file: `.jsonl` with one object a line, else a JSON array of objects.
pub(super) fn read(path: &Path) -> Result<Vec<Item>, CliError> {
    let bad = |reason: String| CliError::Dataset { path: path.display().to_string(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| bad(error.to_string()))?;
    file.take(FILE_LIMIT_BYTES + 1).read_to_string(&mut text).map_err(|error| bad(error.to_string()))?;
    if text.len() as u64 > FILE_LIMIT_BYTES {
        return Err(bad(format!("it is longer than {FILE_LIMIT_BYTES} bytes")));
    }
    let is_lines = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
    let entries: Vec<(String, Value)> = if is_lines {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let read = |(index, line): (usize, &str)| {
            let place = format!("line {}", index + 1);
            let value = serde_json::from_str(line).map_err(|error| bad(format!("{place}: {error}")))?;
            Ok((place, value))
        };
        lines.map(read).collect::<Result<_, CliError>>()?
    } else {
        let value: Value = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        let Value::Array(items) = value else { return Err(bad("wanted an array of items".to_owned())) };
        items.into_iter().enumerate().map(|(index, item)| (format!("item {}", index + 1), item)).collect()
    };
    if entries.is_empty() || entries.len() > MAX_ITEMS {
        return Err(bad(format!("wanted 1 to {MAX_ITEMS} items; found {}", entries.len())));
    }
    let mut items: Vec<Item> = Vec::with_capacity(entries.len());
    for (place, value) in entries {
        let item = item(&value).map_err(|reason| bad(format!("{place}: {reason}")))?;
        if items.iter().any(|earlier| earlier.id == item.id) {
            return Err(bad(format!("{place}: the id '{}' was there before", item.id)));
        }
        items.push(item);
    }
    Ok(items)
}

fn item(value: &Value) -> Result<Item, String> {
    let text = |field: &str| match value[field].as_str() {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("{field} must be a string that is not empty; found {}", value[field])),
    };
    let max_tokens = match &value["max_tokens"] {
        Value::Null => DEFAULT_MAX_TOKENS,
        given => given
            .as_u64()
            .and_then(|tokens| usize::try_from(tokens).ok())
            .filter(|&tokens| tokens > 0)
            .ok_or_else(|| format!("max_tokens must be a positive integer; found {given}"))?,
    };
    Ok(Item {
        id: text("id")?,
        category: text("category")?,
        prompt: text("prompt")?,
        expected: text("expected")?,
        max_tokens,
    })
}

const FILE_LIMIT_BYTES: u64 = 16 << 20;
const MAX_ITEMS: usize = 10_000;
const DEFAULT_MAX_TOKENS: usize = 16;
/// Id, category, prompt, what is expected, tokens.
const BUILT_IN: [(&str, &str, &str, &str, usize); 6] = [
    ("fact-capital", "factual_qa", "The capital of France is", "Paris", 8),
    ("fact-water", "factual_qa", "Water is made of hydrogen and", "oxygen", 8),
    ("reason-sum", "reasoning", "Question: What is 2 + 3?\nAnswer: 2 + 3 =", "5", 6),
    ("reason-days", "reasoning", "Monday, Tuesday, Wednesday,", "Thursday", 8),
    ("code-add", "coding", "def add(a, b):\n    \"\"\"Return the sum of a and b.\"\"\"\n    return", "a + b", 8),
    ("complete-proverb", "completion", "An apple a day keeps the doctor", "away", 6),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, text: &str) -> Result<Vec<Item>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn the_built_in_items_are_of_four_categories() {
        let count = |category| built_in().iter().filter(|item| item.category == category).count();
        assert_eq!(["factual_qa", "reasoning", "coding", "completion"].map(count), [2, 2, 1, 1]);
    }

    #[test]
    fn both_formats_are_read() {
        let one = r#"{"id":"a","category":"c","prompt":"p","expected":"e"}"#;
        let two = r#"{"id":"b","category":"c","prompt":"p","expected":"e","max_tokens":3,"more":1}"#;
        for items in [file("x.json", &format!("[{one},{two}]")), file("x.jsonl", &format!("{one}\n\n{two}\n"))] {
            let items = items.unwrap();
            assert_eq!((items[0].max_tokens, items[1].max_tokens, items[1].id.as_str()), (16, 3, "b"));
        }
        for (name, text, part) in [
            ("x.json", "{}", "wanted an array"),
            ("x.json", "[]", "1 to 10000 items; found 0"),
            ("x.json", "[1]", "item 1: id must be a string"),
            ("x.jsonl", "{\"id\":\"a\"}\n{", "line 2:"),
            ("x.jsonl", r#"{"id":"a","category":"c","prompt":"","expected":"e"}"#, "line 1: prompt must be"),
            (
                "x.json",
                r#"[{"id":"a","category":"c","prompt":"p","expected":"e","max_tokens":0}]"#,
                "positive integer; found 0",
            ),
        ] {
            let error = file(name, text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert!(file("x.json", &format!("[{one},{one}]")).unwrap_err().contains("item 2: the id 'a' was there before"));
    }
}
