//! An add-on with everything an add-on can offer: a route, a subcommand and an encoder.
//!
//! The route runs any model with its layers left out: embedding, final norm, head. What it answers is no language, but it is
//! computed from the model's own weights, on the CPU, behind the same traits as every other route.

use npuhal_addon::prelude::*;
use std::io::Write;

npuhal_addon::register_route!(ZeroLayers);
npuhal_addon::register_command!(Shout);
npuhal_addon::register_encoder!(Bytes);
npuhal_addon::export!();

/// Positions of a sequence. Nothing is kept for a position, so this is the host's bookkeeping only.
const WINDOW: u32 = 4096;
/// The option of the route: what the embedding is multiplied by before the norm; 1 where it is not given.
const SCALE: &str = "zero-layers-scale";

/// The route.
struct ZeroLayers;

impl Route for ZeroLayers {
    fn name(&self) -> &str {
        "zero-layers"
    }

    fn model_types(&self) -> &[&str] {
        &["llama", "qwen2", "qwen3"]
    }

    fn option_keys(&self) -> &[&str] {
        &[SCALE]
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        let Some(cpu) = find_device(devices, Generation::Cpu) else { return unavailable("the CPU is not usable") };
        if let Err(reason) = scale(options) {
            return unavailable(reason);
        }
        let detail = "embedding and head only".to_owned();
        let window = options.context_positions.unwrap_or(WINDOW).min(WINDOW);
        Fitness::Serves(Service { speed: SpeedClass::Reference, detail, ..service(cpu, model, window) })
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let scale = scale(request.options).map_err(|reason| declined(self.name(), reason))?;
        let model = request.model.clone();
        let mut norm = vec![0.0; model.config().hidden_size];
        read(&model, TensorRole::FinalNorm, 0, &mut norm).map_err(|reason| declined(self.name(), reason))?;
        Ok(Session::Stepper(Box::new(Open { window: request.service.window, model, norm, scale, held: 0 })))
    }
}

fn scale(options: &Options) -> Result<f32, String> {
    match options.route_options.get(SCALE) {
        None => Ok(1.0),
        Some(text) => match text.parse::<f32>() {
            Ok(scale) if scale.is_finite() && scale > 0.0 => Ok(scale),
            _ => Err(format!("{SCALE} cannot be '{text}'; wanted a positive number")),
        },
    }
}

fn read(model: &ModelSource, role: TensorRole, row: usize, out: &mut [f32]) -> Result<(), String> {
    let tensor = match role {
        TensorRole::Head => model.head(),
        role => model.require(role),
    };
    tensor.map_err(|error| error.to_string())?.dequantize_row(row, out).map_err(|error| error.to_string())
}

/// An open session.
struct Open {
    model: ModelSource,
    norm: Vec<f32>,
    scale: f32,
    window: u32,
    held: usize,
}

impl Open {
    fn logits(&self, token: TokenId, out: &mut [f32]) -> Result<(), String> {
        let mut hidden = vec![0.0; self.norm.len()];
        read(&self.model, TensorRole::TokenEmbedding, token as usize, &mut hidden)?;
        hidden.iter_mut().for_each(|element| *element *= self.scale);
        let mean = hidden.iter().map(|element| element * element).sum::<f32>() / hidden.len() as f32;
        let factor = 1.0 / (mean + self.model.config().rms_norm_eps).sqrt();
        hidden.iter_mut().zip(&self.norm).for_each(|(element, norm)| *element *= factor * norm);
        let mut weights = vec![0.0; hidden.len()];
        for (row, logit) in out.iter_mut().enumerate() {
            read(&self.model, TensorRole::Head, row, &mut weights)?;
            *logit = hidden.iter().zip(&weights).map(|(element, weight)| element * weight).sum();
        }
        Ok(())
    }
}

impl Stepper for Open {
    fn vocab_size(&self) -> usize {
        self.model.config().vocab_size
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.window, rows_per_call: 64, sequences: 1 }
    }

    fn placement(&self) -> Vec<Placement> {
        let layers = 0..self.model.config().layers;
        vec![Placement { layers, device: "cpu".to_owned(), yields: Yields::Logits }]
    }

    fn begin(&mut self) -> Result<(), RunError> {
        Ok(())
    }

    fn end(&mut self) {}

    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError> {
        logits.reset(want.count(rows.len()), self.vocab_size());
        let mut at = 0;
        for (index, row) in rows.iter().enumerate() {
            control.check()?;
            if want.selects(index, rows.len()) {
                self.logits(row.token, logits.row_mut(at)).map_err(|reason| RunError::BadRows { reason })?;
                at += 1;
            }
            self.held = row.position as usize + 1;
        }
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        self.held = self.held.min(len);
        self.held
    }
}

/// The subcommand: `npuhal shout WORDS`.
struct Shout;

impl Command for Shout {
    fn name(&self) -> &str {
        "shout"
    }

    fn help(&self) -> &str {
        "Print the arguments in capital letters"
    }

    fn run(&self, arguments: &[String], output: &mut dyn Write) -> Result<u8, ExtensionError> {
        if arguments.is_empty() {
            return Err(ExtensionError::Failed("there is nothing to shout; wanted at least one word".to_owned()));
        }
        writeln!(output, "{}", arguments.join(" ").to_uppercase())?;
        Ok(0)
    }
}

/// The encoder: how often each byte occurs, as a vector of length 1.
struct Bytes;

impl Encoder for Bytes {
    fn name(&self) -> &str {
        "bytes"
    }

    fn dims(&self) -> usize {
        256
    }

    fn encode(&self, text: &str) -> Result<Vec<f32>, ExtensionError> {
        let mut counts = vec![0.0_f32; 256];
        text.bytes().for_each(|byte| counts[usize::from(byte)] += 1.0);
        let length = counts.iter().map(|count| count * count).sum::<f32>().sqrt().max(1.0);
        Ok(counts.into_iter().map(|count| count / length).collect())
    }
}
