/** Types that the modules of the page share. Nothing in this file runs. */

/**
 * @typedef {object} Model
 * @property {number} index
 * @property {string} name
 * @property {string[]} classes
 * @property {number} channels
 * @property {string} units
 * @property {string} stratum
 * @property {[number, number] | null} size
 * @property {[number, number] | null} window
 * @property {string} title
 */

/**
 * @typedef {object} Palette
 * @property {string[]} heat stops from 0 up
 * @property {string[]} strata
 * @property {string[]} readers
 * @property {string[]} pins
 * @property {string[]} decided one mask, outer and inner bound, then the masks that matter
 */

/**
 * What the page is for: new images ("models"), saved predictions ("predictions") or annotations alone ("data").
 * @typedef {object} About
 * @property {string} version
 * @property {"models" | "predictions" | "data"} kind
 * @property {string} title
 * @property {Palette} palette
 * @property {string[][]} colours of the classes of each model
 * @property {number[]} evaluated class ids of the first model that metrics look at
 * @property {number | null} open the entry of the list to open first
 */

/**
 * @typedef {object} MaskAbout
 * @property {number} weight
 * @property {number[]} [strata] counted from 1
 * @property {number[]} pixels of each class, over all slices
 * @property {string} [name] of a reader, where the masks are annotations
 */

/**
 * @typedef {object} ReaderAbout
 * @property {string} name
 * @property {number[]} pixels of each class
 * @property {number} weight
 */

/**
 * @typedef {object} Summary
 * @property {string} name
 * @property {string} form
 * @property {[number, number]} size
 * @property {number} slices
 * @property {string[]} classes
 * @property {[number | null, number, number] | null} spacing in mm
 * @property {string} units
 * @property {[number, number]} range of raw values
 * @property {{name: string, weights: number[]} | null} strata
 * @property {MaskAbout[]} masks heaviest first
 * @property {number} entropy_max
 * @property {string[]} notes
 * @property {ReaderAbout[]} [readers]
 * @property {string[]} [colours] of the classes
 * @property {number[]} [evaluated]
 */

/**
 * @typedef {object} Slice
 * @property {number} k
 * @property {number} h
 * @property {number} w
 * @property {number} tall of a pixel, as a multiple of its width; places on the screen count widths
 * @property {number} channels
 * @property {Float32Array | null} image [C, h, w]
 * @property {(Uint8Array | Uint16Array)[]} masks
 * @property {(Uint8Array | Uint16Array)[]} centres
 * @property {(Uint8Array | Uint16Array)[]} readers
 * @property {Uint8Array[]} marginal 255 p of each class
 * @property {Uint8Array | null} entropy 255 H / ln C
 * @property {(Uint8Array | Uint16Array)[]} consensus one mask by each rule, once it was asked for; so the next two
 * @property {(Uint8Array | Uint16Array)[]} kept the masks that stand for all
 * @property {(Uint8Array | Uint16Array)[]} bounds of each class the guaranteed outer mask, and the inner one
 * @property {number} keep of how many `kept` was asked for; 0: not yet
 * @property {Map<string, any>} made what was computed from it
 */

/**
 * What the masks mean, for one class.
 * @typedef {object} Decisions
 * @property {number} class that is measured
 * @property {{needed: boolean | null, verdict: string, score: number, reasons: string[]} | null} look
 * @property {{how: string, expected_dice: number | null, expected_iou: number | null, pixels: number[]}[]} consensus
 * @property {{asked: number, weights: number[], pixels: number[][], loss: number, of: number}} kept
 * @property {{what: string, unit: string, mean: number | null, median: number | null, low: number | null, high: number | null}[]} measurements
 * @property {{alpha: number, per: string, data: string, patients: number, classes: Bounds[]} | null} bounds
 */

/** @typedef {{class: number, name: string, area: [number, number], pixels: [number, number]}} Bounds of one class */

/**
 * One run's prediction of the image that is open.
 * @typedef {object} Scene
 * @property {string} id
 * @property {number} model
 * @property {string} label what the run is called on the page
 * @property {Summary} summary
 * @property {string[]} colours
 * @property {Map<number, Slice>} slices that were fetched
 * @property {Decisions | null} decisions once they were asked for
 * @property {number[][] | null} profile pixels of each class that are expected in each slice of a volume
 */

/**
 * What a mask is: of a stratum, drawn, an annotation; one mask for all, one of the masks that matter, a guaranteed bound.
 * @typedef {"centre" | "mask" | "reader" | "consensus" | "kept" | "bound"} Kind
 */

/**
 * @typedef {object} Mark a mask that is looked at
 * @property {number} scene
 * @property {Kind} kind
 * @property {number} index
 * @property {string} colour
 */

/** @typedef {"contours" | "marginal" | "entropy" | "disagreement"} PanelKind */

/**
 * @typedef {object} Entry of the list of images and cases
 * @property {number} index
 * @property {string} name
 * @property {string} kind
 * @property {Record<string, string | number | null>} values
 */

export {};
