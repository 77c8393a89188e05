//! Chat templates of a model directory.

use super::{MAX_SMALL_BYTES, json, read_file};
use crate::text_error::TextError;
use crate::vocabulary::Vocabulary;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Templates of one model at most.
const MAX_TEMPLATES: usize = 64;
/// Name of the template that is used unless another is asked for.
const DEFAULT: &str = "default";

/// Template files beside `tokenizer_config.json`, over whose templates they go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatTemplates {
    /// `chat_template.jinja`.
    pub jinja: Option<Vec<u8>>,
    /// `chat_template.json`, of older processors.
    pub json: Option<Vec<u8>>,
    /// `additional_chat_templates/<name>.jinja`, by name.
    pub additional: BTreeMap<String, Vec<u8>>,
}

impl ChatTemplates {
    pub(super) fn read(directory: &Path) -> Result<Self, TextError> {
        let small = |name: &str| read_file(directory, name, MAX_SMALL_BYTES);
        let folder = directory.join("additional_chat_templates");
        let mut additional = BTreeMap::new();
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten().take(MAX_TEMPLATES) {
            let file_name = entry.file_name().to_string_lossy().into_owned();
            if let Some(name) = file_name.strip_suffix(".jinja")
                && let Some(text) = read_file(&folder, &file_name, MAX_SMALL_BYTES)?
            {
                additional.insert(name.to_owned(), text);
            }
        }
        Ok(Self { jinja: small("chat_template.jinja")?, json: small("chat_template.json")?, additional })
    }

    /// Puts the templates into `vocabulary`. `declared` is what `tokenizer_config.json` has: a text, or a list of named ones.
    pub(super) fn apply(&self, declared: Option<Value>, vocabulary: &mut Vocabulary) -> Result<(), TextError> {
        let mut templates = BTreeMap::new();
        collect("tokenizer_config.json", declared, &mut templates)?;
        if let Some(bytes) = &self.json {
            let file: BTreeMap<String, Value> = json::parse("chat_template.json", bytes)?;
            collect("chat_template.json", file.get("chat_template").cloned(), &mut templates)?;
        }
        if let Some(bytes) = &self.jinja {
            templates.insert(DEFAULT.to_owned(), text("chat_template.jinja", bytes)?);
        }
        for (name, bytes) in &self.additional {
            templates.insert(name.clone(), text(&format!("additional_chat_templates/{name}.jinja"), bytes)?);
        }
        vocabulary.chat_template = templates.remove(DEFAULT);
        vocabulary.named_templates = templates;
        Ok(())
    }
}

fn collect(file: &str, declared: Option<Value>, templates: &mut BTreeMap<String, String>) -> Result<(), TextError> {
    let malformed = |reason: &str| TextError::TokenizerFile { file: file.to_owned(), reason: reason.to_owned() };
    match declared {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => drop(templates.insert(DEFAULT.to_owned(), text)),
        Some(Value::Array(list)) if list.len() <= MAX_TEMPLATES => {
            for item in list {
                let part = |key: &str| item.get(key).and_then(Value::as_str).map(str::to_owned);
                let (Some(name), Some(text)) = (part("name"), part("template")) else {
                    return Err(malformed("chat_template: wanted a name and a template in each element of the list"));
                };
                templates.insert(name, text);
            }
        }
        Some(_) => {
            return Err(malformed("chat_template: wanted a text, or a short list of named templates"));
        }
    }
    Ok(())
}

fn text(file: &str, bytes: &[u8]) -> Result<String, TextError> {
    String::from_utf8(bytes.to_vec())
        .map_err(|error| TextError::TokenizerFile { file: file.to_owned(), reason: error.to_string() })
}
