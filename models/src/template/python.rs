//! Values as Python writes them: `str()`, `repr()` and `json.dumps`, on which templates rely.

use minijinja::value::{Value, ValueKind};
use std::fmt::Write;

/// Levels of nesting that are written.
const MAX_DEPTH: usize = 128;

/// Why a value cannot be written.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unwritable {
    /// Nested beyond [`MAX_DEPTH`].
    TooDeep,
    /// Longer than the limit given.
    TooLong,
    /// JSON has nothing like it.
    NoJson(&'static str),
}

/// Layout of JSON, as the arguments of `tojson` choose it.
#[derive(Debug, Clone)]
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    /// Spaces a level; `None` for one line.
    pub(super) indent: Option<usize>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

/// A text of bounded length being written.
struct Writer {
    out: String,
    limit: usize,
}

impl Writer {
    fn push(&mut self, text: &str) -> Result<(), Unwritable> {
        if text.len() > self.limit - self.out.len().min(self.limit) {
            return Err(Unwritable::TooLong);
        }
        self.out.push_str(text);
        Ok(())
    }
}

/// `str(value)`, at most `limit` bytes. Undefined is empty.
pub(super) fn str(value: &Value, limit: usize) -> Result<String, Unwritable> {
    let mut writer = Writer { out: String::new(), limit };
    match value.as_str() {
        Some(text) => writer.push(text)?,
        None if value.is_undefined() => {}
        None => repr(value, 0, &mut writer)?,
    }
    Ok(writer.out)
}

/// `json.dumps(value)` in `style`, at most `limit` bytes.
pub(super) fn json(value: &Value, style: &JsonStyle, limit: usize) -> Result<String, Unwritable> {
    let mut writer = Writer { out: String::new(), limit };
    write_json(value, style, 0, &mut writer)?;
    Ok(writer.out)
}

fn repr(value: &Value, depth: usize, out: &mut Writer) -> Result<(), Unwritable> {
    if depth > MAX_DEPTH {
        return Err(Unwritable::TooDeep);
    }
    match value.kind() {
        ValueKind::Undefined => out.push("Undefined"),
        ValueKind::None => out.push("None"),
        ValueKind::Bool => out.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push(&number(value)),
        ValueKind::String => out.push(&quote(value.as_str().unwrap_or_default())),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push("[")?;
            for (n, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push(if n == 0 { "" } else { ", " })?;
                repr(&item, depth + 1, out)?;
            }
            out.push("]")
        }
        ValueKind::Map => {
            out.push("{")?;
            for (n, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push(if n == 0 { "" } else { ", " })?;
                repr(&key, depth + 1, out)?;
                out.push(": ")?;
                repr(&value.get_item(&key).unwrap_or_default(), depth + 1, out)?;
            }
            out.push("}")
        }
        _ => out.push("<object>"),
    }
}

/// `repr` of a string.
fn quote(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push(mark);
    for char in text.chars() {
        match char {
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            char if char == mark => {
                quoted.push('\\');
                quoted.push(char);
            }
            char if (char as u32) < 0x20 || (0x7f..0xa1).contains(&(char as u32)) => {
                let _ = write!(quoted, "\\x{:02x}", char as u32);
            }
            char => quoted.push(char),
        }
    }
    quoted.push(mark);
    quoted
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// `repr` of a float: the shortest digits that read back the same, with an exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        format!("{value:?}")
    } else {
        format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    }
}

fn write_json(value: &Value, style: &JsonStyle, depth: usize, out: &mut Writer) -> Result<(), Unwritable> {
    if depth > MAX_DEPTH {
        return Err(Unwritable::TooDeep);
    }
    match value.kind() {
        ValueKind::None => out.push("null"),
        ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push(match &*number(value) {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            number => number,
        }),
        ValueKind::String => write_json_string(value.as_str().unwrap_or_default(), style.ensure_ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            write_json_items("[", "]", items.len(), style, depth, out, |n, out| {
                write_json(&items[n], style, depth + 1, out)
            })
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter().into_iter().flatten().collect();
            if style.sort_keys {
                keys.sort();
            }
            write_json_items("{", "}", keys.len(), style, depth, out, |n, out| {
                let key = &keys[n];
                match key.kind() {
                    ValueKind::String | ValueKind::Bool | ValueKind::Number | ValueKind::None => {}
                    _ => return Err(Unwritable::NoJson("a key that is no string")),
                }
                let text = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
                write_json_string(&text, style.ensure_ascii, out)?;
                out.push(&style.key_separator)?;
                write_json(&value.get_item(key).unwrap_or_default(), style, depth + 1, out)
            })
        }
        ValueKind::Undefined => Err(Unwritable::NoJson("an undefined value")),
        _ => Err(Unwritable::NoJson("an object of the template")),
    }
}

fn write_json_items(
    open: &str,
    close: &str,
    count: usize,
    style: &JsonStyle,
    depth: usize,
    out: &mut Writer,
    mut item: impl FnMut(usize, &mut Writer) -> Result<(), Unwritable>,
) -> Result<(), Unwritable> {
    let line = |depth: usize| style.indent.map_or_else(String::new, |width| format!("\n{}", " ".repeat(width * depth)));
    out.push(open)?;
    for n in 0..count {
        if n > 0 {
            out.push(&style.item_separator)?;
        }
        out.push(&line(depth + 1))?;
        item(n, out)?;
    }
    if count > 0 {
        out.push(&line(depth))?;
    }
    out.push(close)
}

fn write_json_string(text: &str, ensure_ascii: bool, out: &mut Writer) -> Result<(), Unwritable> {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for char in text.chars() {
        match char {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            char if (char as u32) < 0x20 || (ensure_ascii && !char.is_ascii()) => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    let _ = write!(quoted, "\\u{unit:04x}");
                }
            }
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    out.push(&quoted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wanted texts are what CPython 3.12 prints.
    #[test]
    fn floats_as_python_writes_them() {
        for (value, wanted) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(float(value), wanted);
        }
    }

    #[test]
    fn containers_as_python_writes_them() {
        let value: serde_json::Value =
            serde_json::from_str(r#"{"a": [1, 2.0, null, true, "it's \"q\"", "it's"], "b": {}}"#).unwrap();
        let value = Value::from_serialize(&value);
        assert_eq!(str(&value, 1000).unwrap(), r#"{'a': [1, 2.0, None, True, 'it\'s "q"', "it's"], 'b': {}}"#);
        assert_eq!(str(&value, 10), Err(Unwritable::TooLong));
        assert_eq!(str(&Value::UNDEFINED, 10).unwrap(), "");
    }

    #[test]
    fn json_as_python_writes_it() {
        let value: serde_json::Value = serde_json::from_str(r#"{"b":[1,2.5,{}],"a":"<é\u0001\n>","e":[]}"#).unwrap();
        let value = Value::from_serialize(&value);
        let mut style = JsonStyle {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
        };
        assert_eq!(json(&value, &style, 1000).unwrap(), "{\"b\": [1, 2.5, {}], \"a\": \"<é\\u0001\\n>\", \"e\": []}");
        style = JsonStyle { indent: Some(2), item_separator: ",".into(), ensure_ascii: true, sort_keys: true, ..style };
        assert_eq!(
            json(&value, &style, 1000).unwrap(),
            "{\n  \"a\": \"<\\u00e9\\u0001\\n>\",\n  \"b\": [\n    1,\n    2.5,\n    {}\n  ],\n  \"e\": []\n}"
        );
    }
}
