//! `npuhal graph`: the arrays and dataflow of the designs.

use crate::Host;
use crate::args::{GraphArgs, GraphFormat};
use crate::error::CliError;
use crate::graph::dot::{dot, runlist_dot};
use crate::graph::runlist::{QWEN3_0_6B, Runlist};
use crate::graph::svg::{runlist_svg, svg};
use crate::graph::{Array, Design, engines, text};
use crate::output::write;
use crate::session::{open_model, registry};
use crate::terminal::say;
use npuhal_xdna2::dimensions::Dimensions;
use std::io;

enum Drawing {
    Array(Array),
    Runlist(Runlist),
}

pub(crate) fn graph(host: &Host, args: &GraphArgs) -> Result<(), CliError> {
    let drawing = match args.design {
        Design::Smollm => Drawing::Array(engines::smollm()),
        Design::Qwen => Drawing::Array(engines::qwen()),
        Design::Decoder => Drawing::Array(engines::decoder()),
        Design::Lane => Drawing::Runlist(Runlist::new(&dimensions(host, args)?)),
    };
    if args.model.is_some() && args.design != Design::Lane {
        return Err(CliError::Usage(
            "--model is for --design lane; the other designs are made for one shape".to_owned(),
        ));
    }
    let Some(output) = &args.output else {
        for format in formats(args.format) {
            say(&render(&drawing, format)?)?;
        }
        return Ok(());
    };
    for format in formats(args.format) {
        let path =
            if args.format == GraphFormat::All { output.with_extension(extension(format)) } else { output.clone() };
        write(&render(&drawing, format)?, Some(&path))?;
        say(&format!("Exported {} ({}) to {}\n", args.design.name(), word(format), path.display()))?;
    }
    Ok(())
}

fn dimensions(host: &Host, args: &GraphArgs) -> Result<Dimensions, CliError> {
    let Some(spec) = &args.model else { return Ok(QWEN3_0_6B) };
    let model = open_model(host, &registry(host)?, spec, false)?;
    Dimensions::of(model.config())
        .map_err(|error| CliError::Usage(format!("{}: the lane does not take this model: {error}", spec.display())))
}

fn formats(asked: GraphFormat) -> Vec<GraphFormat> {
    match asked {
        GraphFormat::All => vec![GraphFormat::Dot, GraphFormat::Svg, GraphFormat::Json, GraphFormat::Text],
        one => vec![one],
    }
}

fn extension(format: GraphFormat) -> &'static str {
    if format == GraphFormat::Text { "txt" } else { word(format) }
}

fn word(format: GraphFormat) -> &'static str {
    match format {
        GraphFormat::Svg => "svg",
        GraphFormat::Dot => "dot",
        GraphFormat::Json => "json",
        GraphFormat::Text => "text",
        GraphFormat::All => "all",
    }
}

fn render(drawing: &Drawing, format: GraphFormat) -> Result<String, CliError> {
    Ok(match (drawing, format) {
        (Drawing::Array(array), GraphFormat::Svg) => svg(array),
        (Drawing::Array(array), GraphFormat::Dot) => dot(array),
        (Drawing::Array(array), GraphFormat::Json) => json(array)?,
        (Drawing::Array(array), _) => text::text(array),
        (Drawing::Runlist(runlist), GraphFormat::Svg) => runlist_svg(runlist),
        (Drawing::Runlist(runlist), GraphFormat::Dot) => runlist_dot(runlist),
        (Drawing::Runlist(runlist), GraphFormat::Json) => json(runlist)?,
        (Drawing::Runlist(runlist), _) => runlist.text(),
    })
}

fn json(value: &impl serde::Serialize) -> Result<String, CliError> {
    Ok(format!("{}\n", serde_json::to_string_pretty(value).map_err(io::Error::other)?))
}
