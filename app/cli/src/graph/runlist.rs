//! The runlist of a token of the xdna2 lane.

use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::{HEAD_ARGUMENTS, HEAD_KERNEL, LAYER_ARGUMENTS};
use npuhal_xdna2::packing::BufferSizes;
use serde::Serialize;
use std::fmt::Write;

/// Shape of the published lane's model, Qwen3-0.6B, drawn where no model is named.
pub(crate) const QWEN3_0_6B: Dimensions = Dimensions {
    hidden: 1024,
    layers: 28,
    heads: 16,
    kv_heads: 8,
    intermediate: 3072,
    vocab: 151_936,
    rope_theta: 1e6,
};

/// Runs in order, and the buffers they work on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Runlist {
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) description: String,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) runs: Vec<Run>,
}

/// A buffer, or one of each layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Buffer {
    pub(crate) name: String,
    /// How many there are: 1, or one for each layer (and slot).
    pub(crate) count: usize,
    pub(crate) len_bytes: u64,
    pub(crate) description: String,
    #[serde(skip)]
    pub(crate) short: String,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Run {
    pub(crate) index: usize,
    pub(crate) kernel: String,
    pub(crate) arguments: Vec<Argument>,
}

/// A buffer at a place of a run's arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Argument {
    pub(crate) index: usize,
    pub(crate) buffer: String,
    pub(crate) direction: &'static str,
}

impl Argument {
    /// Whether the run only writes it.
    pub(crate) fn is_written(&self) -> bool {
        self.direction == "out"
    }
}

impl Buffer {
    /// Name and size.
    pub(crate) fn label(&self) -> String {
        format!("{} ({})", self.name, size(self.len_bytes))
    }

    /// Name, with the number of the layer where there is one of each; size; a few words.
    pub(crate) fn lines_of(&self, run: usize) -> [String; 3] {
        let name = if self.count == 1 { self.name.clone() } else { format!("{}[{run}]", self.name) };
        [name, size(self.len_bytes), self.short.clone()]
    }
}

fn size(bytes: u64) -> String {
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    if mebibytes < 0.1 { format!("{bytes} B") } else { format!("{mebibytes:.1} MiB") }
}

/// Name of a buffer by the kernel's name of its argument; the head's weights are not a layer's.
fn buffer_name(argument: &str, is_head: bool) -> String {
    if is_head && argument == LAYER_ARGUMENTS[1] { "head weights".to_owned() } else { argument.to_owned() }
}

impl Runlist {
    /// The runlist of a model.
    pub(crate) fn new(dimensions: &Dimensions) -> Self {
        let (sizes, layers) = (BufferSizes::new(dimensions), dimensions.layers);
        let [act, weights, layer_norms, head_norms, kv] = LAYER_ARGUMENTS;
        let [logits, head, _, final_norm] = HEAD_ARGUMENTS;
        let buffer = |name: &str, is_head, count, len_bytes, short: &str, description: &str| Buffer {
            name: buffer_name(name, is_head),
            count,
            len_bytes,
            description: description.to_owned(),
            short: short.to_owned(),
        };
        let buffers = vec![
            buffer(
                act,
                false,
                1,
                sizes.act,
                "",
                "residual stream, bf16; the host writes the token's embedding, every run goes on",
            ),
            buffer(weights, false, layers, sizes.weights, "4-bit tiles", "packed projections of a layer"),
            buffer(layer_norms, false, layers, sizes.layer_norms, "two norms", "input and post-attention norm"),
            buffer(
                head_norms,
                false,
                2 * layers,
                sizes.norms,
                "rotation, per slot",
                "rotation of the position, norms of query and key heads; one for each slot",
            ),
            buffer(kv, false, layers, sizes.kv, "grows by a position", "keys and values of all positions"),
            buffer(logits, true, 1, sizes.logits, "bf16", "logits, bf16"),
            buffer(head, true, 1, sizes.head, "4-bit tiles", "packed head"),
            buffer(final_norm, true, 1, sizes.final_norm, "one norm", "final norm"),
        ];
        let arguments = |names: &[&str], is_head, direction: fn(usize) -> &'static str| {
            let argument = |(index, name): (usize, &&str)| Argument {
                index,
                buffer: buffer_name(name, is_head),
                direction: direction(index),
            };
            names.iter().enumerate().map(argument).collect::<Vec<_>>()
        };
        // Residual stream and KV cache go in and out; the head writes logits only.
        let of_layer =
            arguments(&LAYER_ARGUMENTS, false, |index| if index == 0 || index == 4 { "inout" } else { "in" });
        let of_head = arguments(&HEAD_ARGUMENTS, true, |index| if index == 0 { "out" } else { "in" });
        let layer = |index| Run { index, kernel: "layer (context N)".to_owned(), arguments: of_layer.clone() };
        let mut runs: Vec<Run> = (0..layers).map(layer).collect();
        runs.push(Run { index: layers, kernel: HEAD_KERNEL.to_owned(), arguments: of_head });
        Self {
            name: "lane_runlist".to_owned(),
            title: format!("Full-ELF Lane: One Runlist a Token ({layers} layers + head)"),
            description: "Two slots alternate: while one runs, the layer runs of the other are bound to the kernel of the next context \
                          length."
                .to_owned(),
            buffers,
            runs,
        }
    }

    /// How many runs work on a buffer.
    pub(crate) fn uses(&self, buffer: &str) -> usize {
        self.runs.iter().filter(|run| run.arguments.iter().any(|argument| argument.buffer == buffer)).count()
    }

    /// The runs that are drawn: at most five places, `None` for those left out.
    pub(crate) fn shown(&self) -> Vec<Option<&Run>> {
        match self.runs.as_slice() {
            [first, second, _, _, _, .., last, head] => vec![Some(first), Some(second), None, Some(last), Some(head)],
            few => few.iter().take(5).map(Some).collect(),
        }
    }

    /// Runs and buffers as text.
    pub(crate) fn text(&self) -> String {
        let mut text =
            format!("=== {} ===\n{}\n\nBuffers ({} kinds):\n", self.title, self.description, self.buffers.len());
        let _ = writeln!(text, "{:<14} {:<6} {:<14} Description\n{}", "Name", "Count", "Bytes each", "-".repeat(80));
        for buffer in &self.buffers {
            let Buffer { name, count, len_bytes, description, .. } = buffer;
            let _ = writeln!(text, "{name:<14} {count:<6} {len_bytes:<14} {description}");
        }
        let _ = writeln!(
            text,
            "\nRuns ({} total):\n{:<5} {:<18} Arguments\n{}",
            self.runs.len(),
            "Run",
            "Kernel",
            "-".repeat(80)
        );
        for run in &self.runs {
            let argument =
                |argument: &Argument| format!("{} {} ({})", argument.index, argument.buffer, argument.direction);
            let arguments: Vec<String> = run.arguments.iter().map(argument).collect();
            let _ = writeln!(text, "{:<5} {:<18} {}", run.index, run.kernel, arguments.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_model_has_29_runs() {
        let runlist = Runlist::new(&QWEN3_0_6B);
        assert_eq!((runlist.runs.len(), runlist.uses("act"), runlist.uses("head weights")), (29, 29, 1));
        let bytes = |name: &str| runlist.buffers.iter().find(|buffer| buffer.name == name).unwrap().len_bytes;
        assert_eq!(["weights", "head weights", "KV cache"].map(bytes), [9_830_400, 97_239_040, 32 << 20]);
        for run in &runlist.runs {
            for argument in &run.arguments {
                assert!(runlist.buffers.iter().any(|buffer| buffer.name == argument.buffer), "{argument:?}");
            }
        }
        let shown: Vec<Option<usize>> = runlist.shown().iter().map(|run| run.map(|run| run.index)).collect();
        assert_eq!(shown, [Some(0), Some(1), None, Some(27), Some(28)]);
        assert!(
            runlist.text().contains(
                "28    flhead             0 logits (out), 1 head weights (in), 2 act (in), 3 final norm (in)"
            )
        );
    }

    #[test]
    fn a_small_model_is_drawn_whole() {
        let runlist = Runlist::new(&Dimensions { layers: 2, ..QWEN3_0_6B });
        assert_eq!(runlist.shown().iter().flatten().count(), 3);
    }
}
