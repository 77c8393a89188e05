//! The parts that `tokenizer.json` declares, as [`TextRules`]; whatever has no counterpart there is refused by its name.

use super::json::{ModelJson, TokenizerJson, VocabJson};
use crate::text_rules::{Behavior, Cut, Normalizer, Pattern, Prepend, Spelling, TextRules, TokenModel};
use crate::tokenizer::gpt2_cut;
use serde_json::{Map, Value};

/// Parts of a sequence, over all levels.
const MAX_PARTS: usize = 64;
/// Times as long as a text may become by replacements; in published files it is 3 or, with a mark in front, 12.
const MAX_GROWTH: usize = 256;

/// What is declared.
#[derive(Debug)]
pub(super) struct Declared {
    pub(super) rules: TextRules,
    /// The token that is put in front of every text.
    pub(super) adds: Option<String>,
}

/// What is refused, in words.
type Refused = String;

/// Name of the tokenizer model, as GGUF files have it.
pub(super) fn model_name(model: &ModelJson) -> &'static str {
    match &model.vocab {
        VocabJson::Scores(_) => "t5",
        VocabJson::Ids(_) if model.byte_fallback == Some(true) => "llama",
        VocabJson::Ids(_) => "gpt2",
    }
}

/// Whether tokens such as `<0x0A>` stand for bytes.
pub(super) fn has_byte_tokens(declared: &Declared) -> bool {
    matches!(declared.rules.spelling, Spelling::Pieces { .. })
        && matches!(
            declared.rules.model,
            TokenModel::Bpe { byte_fallback: true, .. } | TokenModel::Unigram { byte_fallback: true }
        )
}

/// The rules of `file`.
pub(super) fn rules(file: &TokenizerJson) -> Result<Declared, Refused> {
    let mut normalizers = Vec::new();
    for part in parts(file.normalizer.as_ref(), "normalizer", "normalizers")? {
        normalizers.push(normalizer(part)?);
    }
    let cuts = pre_tokenizer(file.pre_tokenizer.as_ref(), &mut normalizers)?;
    check_growth("normalizers", normalizers.iter().map(growth))?;
    let model = model(&file.model)?;
    let spelling = spelling(file.decoder.as_ref(), cuts.byte_level, model)?;
    let adds = post_processor(file.post_processor.as_ref())?;
    Ok(Declared { rules: TextRules { normalizers, cuts: cuts.cuts, model, spelling }, adds })
}

/// Refuses steps that together would make a small text a huge one.
fn check_growth(what: &str, factors: impl Iterator<Item = usize>) -> Result<(), Refused> {
    match factors.fold(1, usize::saturating_mul) {
        0..=MAX_GROWTH => Ok(()),
        found => Err(format!("{what} that make a text up to {found} times as long")),
    }
}

/// How many times as long a step makes a text at most.
fn growth(step: &Normalizer) -> usize {
    match step {
        Normalizer::Replace { from, to } => times(from, to),
        Normalizer::Metaspace { mark, .. } => mark.len_utf8(),
        // Of a text of one character.
        Normalizer::Prepend(prefix) => prefix.len() + 1,
        // Forms of Unicode do not add up; once they make up to 18 of one.
        _ => 1,
    }
}

fn times(from: &str, to: &str) -> usize {
    to.len().div_ceil(from.len().max(1)).max(1)
}

/// The parts of what may be a sequence, possibly of sequences.
fn parts<'v>(value: Option<&'v Value>, what: &str, list: &str) -> Result<Vec<Part<'v>>, Refused> {
    let mut open: Vec<&Value> = value.into_iter().filter(|value| !value.is_null()).collect();
    let mut parts = Vec::new();
    while let Some(value) = open.pop() {
        let part = Part::new(value, what)?;
        if part.name == "Sequence" {
            let items = part.get(list).and_then(Value::as_array);
            let items = items.ok_or_else(|| format!("a {what} \"Sequence\" without {list:?}"))?;
            open.extend(items.iter().rev());
        } else {
            parts.push(part);
        }
        if parts.len() + open.len() > MAX_PARTS {
            return Err(format!("more than {MAX_PARTS} parts of a {what}"));
        }
    }
    Ok(parts)
}

/// One part: an object with a type.
struct Part<'v> {
    what: String,
    name: &'v str,
    fields: &'v Map<String, Value>,
}

impl<'v> Part<'v> {
    fn new(value: &'v Value, what: &str) -> Result<Self, Refused> {
        let fields = value.as_object().ok_or_else(|| format!("a {what} that is no object"))?;
        let name = fields.get("type").and_then(Value::as_str).ok_or_else(|| format!("a {what} without a type"))?;
        Ok(Self { what: what.to_owned(), name, fields })
    }

    fn get(&self, key: &str) -> Option<&'v Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Refuses fields that are not among `known`.
    fn only(&self, known: &[&str]) -> Result<(), Refused> {
        match self.fields.keys().find(|key| *key != "type" && !known.contains(&key.as_str())) {
            Some(key) => Err(self.refused(&format!("with {key:?}"))),
            None => Ok(()),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, Refused> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.refused(&format!("with {key} = {value}"))),
        }
    }

    fn text(&self, key: &str) -> Result<&'v str, Refused> {
        self.get(key).and_then(Value::as_str).ok_or_else(|| self.refused(&format!("without a text for {key:?}")))
    }

    /// A pattern: a text or a regular expression.
    fn pattern(&self) -> Result<Pattern, Refused> {
        let pattern = self.get("pattern").and_then(Value::as_object);
        let field = |key: &str| pattern.and_then(|p| p.get(key)).and_then(Value::as_str).filter(|p| !p.is_empty());
        match (field("String"), field("Regex")) {
            (Some(text), None) => Ok(Pattern::Text(text.to_owned())),
            (None, Some(regex)) => Ok(Pattern::Regex(regex.to_owned())),
            _ => Err(self.refused("without a pattern")),
        }
    }

    fn refused(&self, how: &str) -> Refused {
        let space = if how.is_empty() { "" } else { " " };
        let name: String = self.name.chars().take(60).collect();
        let how: String = how.chars().take(200).collect();
        format!("the {} {name:?}{space}{how}", self.what)
    }
}

fn normalizer(part: Part<'_>) -> Result<Normalizer, Refused> {
    Ok(match part.name {
        "NFC" => Normalizer::Nfc,
        "NFD" => Normalizer::Nfd,
        "NFKC" => Normalizer::Nfkc,
        "NFKD" => Normalizer::Nfkd,
        "Prepend" => Normalizer::Prepend(part.text("prepend")?.to_owned()),
        "Replace" => match part.pattern()? {
            Pattern::Text(from) => Normalizer::Replace { from, to: part.text("content")?.to_owned() },
            Pattern::Regex(regex) => return Err(part.refused(&format!("by the regular expression {regex:?}"))),
        },
        _ => return Err(part.refused("")),
    })
}

/// Cuts, and whether words are then spelled in the byte-level alphabet.
struct Cuts {
    cuts: Vec<Cut>,
    byte_level: bool,
}

fn pre_tokenizer(value: Option<&Value>, normalizers: &mut Vec<Normalizer>) -> Result<Cuts, Refused> {
    let mut all = Cuts { cuts: Vec::new(), byte_level: false };
    for part in parts(value, "pre-tokenizer", "pretokenizers")? {
        if all.byte_level {
            return Err(part.refused("behind \"ByteLevel\""));
        }
        match part.name {
            "ByteLevel" => {
                part.only(&["add_prefix_space", "trim_offsets", "use_regex"])?;
                if part.flag("add_prefix_space", true)? {
                    return Err(part.refused("with add_prefix_space"));
                }
                if part.flag("use_regex", true)? {
                    all.cuts.push(gpt2_cut());
                }
                all.byte_level = true;
            }
            "Split" => {
                part.only(&["pattern", "behavior", "invert"])?;
                let behavior = match part.text("behavior")? {
                    "Isolated" => Behavior::Isolated,
                    "MergedWithPrevious" => Behavior::WithPrevious,
                    "MergedWithNext" => Behavior::WithNext,
                    "Contiguous" => Behavior::Contiguous,
                    other => return Err(part.refused(&format!("of behavior {other:?}"))),
                };
                all.cuts.push(Cut::Pattern { pattern: part.pattern()?, behavior, invert: part.flag("invert", false)? });
            }
            "Digits" => {
                part.only(&["individual_digits"])?;
                all.cuts.push(Cut::Digits { individual: part.flag("individual_digits", false)? });
            }
            "Metaspace" if all.cuts.is_empty() => {
                let (marker, cut) = metaspace(&part)?;
                normalizers.push(marker);
                all.cuts.extend(cut);
            }
            "Metaspace" => return Err(part.refused("behind another pre-tokenizer")),
            _ => return Err(part.refused("")),
        }
    }
    Ok(all)
}

fn metaspace(part: &Part<'_>) -> Result<(Normalizer, Option<Cut>), Refused> {
    part.only(&["replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"])?;
    let mut chars = part.text("replacement")?.chars();
    let mark = chars.next().filter(|_| chars.next().is_none());
    let mark = mark.ok_or_else(|| part.refused("whose replacement is not one character"))?;
    let prepend = match part.get("prepend_scheme") {
        // Files of older versions have only the flag.
        None if part.flag("add_prefix_space", true)? => Prepend::Always,
        None => Prepend::Never,
        Some(scheme) => match scheme.as_str() {
            Some("always") => Prepend::Always,
            Some("first") => Prepend::First,
            Some("never") => Prepend::Never,
            _ => return Err(part.refused(&format!("with prepend_scheme {scheme}"))),
        },
    };
    let pattern = Pattern::Text(mark.to_string());
    let cut =
        part.flag("split", true)?.then_some(Cut::Pattern { pattern, behavior: Behavior::WithNext, invert: false });
    Ok((Normalizer::Metaspace { mark, prepend }, cut))
}

fn model(model: &ModelJson) -> Result<TokenModel, Refused> {
    let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let refused = match (model.r#type.as_deref(), &model.vocab) {
        (Some("BPE") | None, VocabJson::Ids(_)) if model.dropout.is_some_and(|dropout| dropout != 0.0) => {
            "a dropout of merges"
        }
        (Some("BPE") | None, VocabJson::Ids(_)) if set(&model.continuing_subword_prefix) => {
            "a continuing_subword_prefix"
        }
        (Some("BPE") | None, VocabJson::Ids(_)) if set(&model.end_of_word_suffix) => "an end_of_word_suffix",
        (Some("BPE") | None, VocabJson::Ids(_)) => {
            return Ok(TokenModel::Bpe {
                whole_words: model.ignore_merges.unwrap_or(false),
                byte_fallback: model.byte_fallback.unwrap_or(false),
                fuse_unknown: model.fuse_unk.unwrap_or(false),
            });
        }
        (Some("Unigram") | None, VocabJson::Scores(_)) => {
            return Ok(TokenModel::Unigram { byte_fallback: model.byte_fallback.unwrap_or(false) });
        }
        (Some(name), _) => return Err(format!("the model {:?}", name.chars().take(60).collect::<String>())),
    };
    Err(refused.to_owned())
}

fn spelling(decoder: Option<&Value>, byte_level: bool, model: TokenModel) -> Result<Spelling, Refused> {
    let parts = parts(decoder, "decoder", "decoders")?;
    if byte_level {
        return match parts.iter().find(|part| part.name != "ByteLevel") {
            Some(part) => Err(part.refused("with the pre-tokenizer \"ByteLevel\"")),
            None => Ok(Spelling::ByteLevel),
        };
    }
    let (mut replace, mut bytes, mut fused, mut strip_first_space) = (Vec::new(), false, false, false);
    for part in parts {
        match part.name {
            "Replace" if !fused => match part.pattern()? {
                Pattern::Text(from) => replace.push((from, part.text("content")?.to_owned())),
                Pattern::Regex(regex) => return Err(part.refused(&format!("by the regular expression {regex:?}"))),
            },
            "ByteFallback" if !fused => bytes = true,
            "Fuse" => fused = true,
            "Strip" if fused => {
                let count = |key: &str| part.get(key).and_then(Value::as_u64);
                if (part.text("content")?, count("start"), count("stop")) != (" ", Some(1), Some(0)) {
                    return Err(part.refused("of anything but one space at the start"));
                }
                strip_first_space = true;
            }
            "Metaspace" if !fused => {
                let (marker, _) = metaspace(&part)?;
                let Normalizer::Metaspace { mark, prepend } = marker else { continue };
                replace.push((mark.to_string(), " ".to_owned()));
                strip_first_space = prepend != Prepend::Never;
            }
            _ => return Err(part.refused("at this place")),
        }
    }
    check_growth("decoders", replace.iter().map(|(from, to)| times(from, to)))?;
    let falls_back =
        matches!(model, TokenModel::Bpe { byte_fallback: true, .. } | TokenModel::Unigram { byte_fallback: true });
    if falls_back && !bytes {
        return Err("a fallback to bytes that the decoder does not undo".to_owned());
    }
    Ok(Spelling::Pieces { replace, strip_first_space })
}

/// The token that is put in front of every text.
fn post_processor(value: Option<&Value>) -> Result<Option<String>, Refused> {
    let mut adds = None;
    for part in parts(value, "post-processor", "processors")? {
        match part.name {
            // About offsets only.
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let single = part.get("single").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
                let special =
                    |item: &Value| item.pointer("/SpecialToken/id").and_then(Value::as_str).map(str::to_owned);
                let is_text = |item: &Value| item.get("Sequence").is_some();
                match single {
                    [text] if is_text(text) => {}
                    [token, text] if is_text(text) && adds.is_none() && special(token).is_some() => {
                        adds = special(token)
                    }
                    _ => return Err(part.refused("that adds more than one token in front of the text")),
                }
            }
            _ => return Err(part.refused("")),
        }
    }
    Ok(adds)
}
