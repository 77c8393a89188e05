//! How text becomes tokens and tokens become text: the parts of a tokenizer, as a file declares them or as the names in a
//! GGUF file stand for them.

use crate::text_error::TextError;
use crate::vocabulary::{RulesSource, Vocabulary};

/// Stands for a space in SentencePiece vocabularies.
pub(crate) const SPACE_MARK: &str = "\u{2581}";

/// The parts of a tokenizer, in the order in which they work.
#[derive(Debug, Clone, PartialEq)]
pub struct TextRules {
    /// Changes of the text before it is cut.
    pub normalizers: Vec<Normalizer>,
    /// Cuts into words, each applied to the pieces of the one before.
    pub cuts: Vec<Cut>,
    /// From words to tokens.
    pub model: TokenModel,
    /// From tokens to text.
    pub spelling: Spelling,
}

/// A change of the text before it is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Normalizer {
    /// Unicode normalisation form C.
    Nfc,
    /// Unicode normalisation form D.
    Nfd,
    /// Unicode normalisation form KC.
    Nfkc,
    /// Unicode normalisation form KD.
    Nfkd,
    /// Puts a text in front of every section between added tokens.
    Prepend(String),
    /// Replaces every occurrence of `from`.
    Replace {
        /// What is looked for; not empty.
        from: String,
        /// What is put there.
        to: String,
    },
    /// Spaces become `mark`; a section that does not start with it gets one in front.
    Metaspace {
        /// Stands for a space.
        mark: char,
        /// Which sections get one in front.
        prepend: Prepend,
    },
}

/// Which sections get a space mark in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prepend {
    /// None.
    Never,
    /// The one at the start of the text.
    First,
    /// All.
    Always,
}

/// A cut into words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// At every match of a pattern.
    Pattern {
        /// What is looked for.
        pattern: Pattern,
        /// What becomes of matches.
        behavior: Behavior,
        /// Whether what lies between the matches takes their part, and they its.
        invert: bool,
    },
    /// At numbers: digits one by one, or runs of them.
    Digits {
        /// One by one.
        individual: bool,
    },
}

/// What a cut looks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pattern {
    /// A text.
    Text(String),
    /// A regular expression with Unicode classes, `^` and `$` at lines, as Oniguruma reads it.
    Regex(String),
}

/// What becomes of a match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behavior {
    /// A piece of its own.
    Isolated,
    /// The end of the piece before.
    WithPrevious,
    /// The start of the piece behind.
    WithNext,
    /// One piece with the matches next to it.
    Contiguous,
}

/// From words to tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenModel {
    /// Byte-pair encoding by a list of merges.
    Bpe {
        /// A word that is a token is taken whole, whatever the merges say.
        whole_words: bool,
        /// Characters without a token become tokens of their bytes.
        byte_fallback: bool,
        /// Unknown characters next to each other are one unknown token.
        fuse_unknown: bool,
    },
    /// SentencePiece's byte-pair encoding: the pair that makes the token of the highest score is merged first, the leftmost on
    /// ties. Characters without a token become tokens of their bytes.
    ScoredBpe,
    /// SentencePiece's unigram: the tokens whose scores have the highest sum.
    Unigram {
        /// Characters without a token become tokens of their bytes.
        byte_fallback: bool,
    },
}

/// How tokens spell text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spelling {
    /// In the byte-level alphabet of GPT-2.
    ByteLevel,
    /// As text in which something is replaced, with tokens for single bytes, `<0x00>` to `<0xFF>`.
    Pieces {
        /// Replacements in every token.
        replace: Vec<(String, String)>,
        /// Whether a text loses one space at its start.
        strip_first_space: bool,
    },
}

impl TextRules {
    /// The rules of `vocabulary`.
    ///
    /// # Errors
    /// A tokenizer model, a pre-tokenizer or a declared part that is not supported.
    pub fn of(vocabulary: &Vocabulary) -> Result<Self, TextError> {
        match &vocabulary.rules {
            RulesSource::Declared(rules) => return Ok((**rules).clone()),
            RulesSource::Refused(feature) => return Err(TextError::UnsupportedFeature { feature: feature.clone() }),
            RulesSource::Named => {}
        }
        match vocabulary.model.as_str() {
            "gpt2" => crate::tokenizer::named_rules(&vocabulary.pre_tokenizer),
            "llama" => Ok(Self::sentence_piece(TokenModel::ScoredBpe, vocabulary.add_space_prefix)),
            "t5" => Ok(Self::sentence_piece(TokenModel::Unigram { byte_fallback: true }, vocabulary.add_space_prefix)),
            _ => Err(TextError::UnsupportedModel {
                model: vocabulary.model.clone(),
                supported: "gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (SentencePiece unigram)",
            }),
        }
    }

    /// SentencePiece without normalisation: spaces are marks, and one is put in front of every section.
    fn sentence_piece(model: TokenModel, space_prefix: bool) -> Self {
        let mut normalizers = Vec::new();
        if space_prefix {
            normalizers.push(Normalizer::Prepend(SPACE_MARK.to_owned()));
        }
        normalizers.push(Normalizer::Replace { from: " ".to_owned(), to: SPACE_MARK.to_owned() });
        let replace = vec![(SPACE_MARK.to_owned(), " ".to_owned())];
        let spelling = Spelling::Pieces { replace, strip_first_space: space_prefix };
        Self { normalizers, cuts: Vec::new(), model, spelling }
    }
}
